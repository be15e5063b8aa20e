// A notebook editor that treats a kernel as VS Code does, with VS Code's own bundle of the widgets.
//
// VS Code runs the cells in its extension host, and shows their outputs in a frame, which has a kernel of its own for
// the widgets: it gets a copy of each message of the real one, and what it sends goes to the real one.

import { CommsOverSubshells, KernelMessage, ServerConnection } from '@jupyterlab/services';
import { KernelConnection } from '@jupyterlab/services/lib/kernel/default';
import { deserialize } from '@jupyterlab/services/lib/kernel/serialize';

const WIDGET = 'application/vnd.jupyter.widget-view+json';
const STATE = 'application/vnd.jupyter.widget-state+json';
/** The mime types that are shown, the preferred ones first. */
const ORDER = [WIDGET, 'text/html', 'image/svg+xml', 'image/png', 'text/plain'];
/** Comms share the thread of the cells: VS Code knows no subshells. */
const USUAL = { username: '', handleComms: true, commsOverSubshells: CommsOverSubshells.Disabled };
const THEMES = {
  'vscode-light': { '--vscode-editor-background': '#ffffff', '--vscode-editor-foreground': '#3b3b3b' },
  'vscode-dark': { '--vscode-editor-background': '#1f1f1f', '--vscode-editor-foreground': '#cccccc' },
  'vscode-high-contrast': {
    '--vscode-editor-background': '#000000',
    '--vscode-editor-foreground': '#ffffff',
    '--vscode-contrastBorder': '#6fc3df'
  },
  'vscode-high-contrast-light': {
    '--vscode-editor-background': '#ffffff',
    '--vscode-editor-foreground': '#292929',
    '--vscode-contrastBorder': '#0f4a85'
  }
};

/** The kernel of the frame: what it sends goes to the extension host, and messages come from there. */
class Copy {
  constructor(model, clientId, send) {
    let socket;
    class ProxySocket {
      protocol = '';
      open = true;
      constructor() {
        socket = this;
      }
      close() {}
      send(data) {
        if (this.open) {
          send(data);
        }
      }
    }
    const serverSettings = ServerConnection.makeSettings({ WebSocket: ProxySocket, wsUrl: 'ws://nowhere' });
    this.kernel = new KernelConnection({ serverSettings, clientId, model, ...USUAL });
    this.socket = socket;
    // The kernel is taken to have answered already.
    const original = this.kernel.requestKernelInfo.bind(this.kernel);
    this.kernel.requestKernelInfo = () => Promise.resolve();
    socket.onopen({ target: socket });
    this.kernel.requestKernelInfo = original;
  }

  take(data) {
    this.socket.onmessage({ target: this.socket, data, type: '' });
  }

  /** Take a request of the real kernel as one of this one, without sending it. */
  mirror(message) {
    this.socket.open = false;
    try {
      this.kernel.sendShellMessage(message, false, message.content.silent);
    } finally {
      this.socket.open = true;
    }
  }
}

/** Shows widgets in the frame. */
class Widgets {
  constructor(frame, copy, scripts, state) {
    this.isSaved = Boolean(state);
    this.ready = new Map();
    this.errors = [];
    const loader = {
      widgetsRegisteredInRequireJs: new Set(),
      errorHandler: (name, module, version, error) => this.errors.push(`${module}: ${error}`),
      successHandler: () => {},
      loadWidgetScript: async module => {
        if (scripts[module]) {
          frame.requirejs.config({ paths: { [module]: scripts[module].replace(/\.js$/, '') } });
          loader.widgetsRegisteredInRequireJs.add(module);
        }
      }
    };
    this.manager = new frame.vscIPyWidgets.WidgetManager(copy.kernel, undefined, loader, () => {}, state && { [STATE]: state });
    copy.kernel.iopubMessage.connect((_, message) => this.prime(message));
  }

  /** A widget is shown once its output has passed here, after the messages that make its model. */
  async prime(message) {
    const id = modelOf(message);
    if (id) {
      const model = Promise.resolve(this.manager.get_model(id));
      model.catch(() => {});
      this.wait(id).resolve(model);
    }
  }

  wait(id) {
    if (!this.ready.has(id)) {
      let resolve;
      const promise = new Promise(done => (resolve = done));
      this.ready.set(id, { promise, resolve });
    }
    return this.ready.get(id);
  }

  async render(id, element) {
    try {
      const model = await this.wait(id).promise;
      if (this.isSaved) {
        model.comm_live = false;
      }
      const view = await this.manager.create_view(model, { el: element });
      if (this.isSaved) {
        view.initialize({ model, el: element, options: {} });
      }
      const shown = await this.manager.display_view({ model_id: id, version_major: 2 }, view, { node: element });
      setTimeout(() => makeReachable(element), 500);
      return shown;
    } catch (error) {
      this.errors.push(String(error));
      return undefined;
    }
  }
}

/** Have the Tab key reach the buttons of a widget, and Enter and Space press them, as VS Code does once. */
function makeReachable(element) {
  for (const each of element.querySelectorAll('button:not([tabindex]), a[href]:not([tabindex]), [role="button"]:not([tabindex])')) {
    each.setAttribute('tabindex', '0');
    each.addEventListener('keydown', event => {
      if (event.key === 'Enter' || event.key === ' ') {
        event.preventDefault();
        each.click();
      }
    });
  }
}

function modelOf(message) {
  const shows = ['display_data', 'execute_result', 'update_display_data'].includes(message.header.msg_type);
  return shows ? message.content.data?.[WIDGET]?.model_id : undefined;
}

/** One run of a cell: what it shows, and what is shown for it later. */
class Run {
  constructor(editor, cell) {
    this.editor = editor;
    this.cell = cell;
    this.owned = new Set();
    this.comms = new Set();
    this.clears = false;
    this.done = false;
  }

  take(message) {
    const { content } = message;
    switch (message.header.msg_type) {
      case 'comm_open':
        this.comms.add(content.comm_id);
        break;
      case 'stream':
        this.stream(content);
        break;
      case 'display_data':
      case 'execute_result':
        this.add({ data: content.data, display: content.transient?.display_id });
        break;
      case 'update_display_data':
        this.editor.update(content);
        break;
      case 'clear_output':
        this.clears = content.wait;
        if (!content.wait) {
          this.editor.clear(this.cell);
        }
        break;
      case 'error':
        this.add({ data: { 'text/plain': content.traceback.join('\n') } });
    }
  }

  stream({ name, text }) {
    const last = this.cell.outputs.at(-1);
    if (!this.clears && last?.stream === name) {
      last.data['text/plain'] += text;
      this.editor.show(last);
    } else {
      this.add({ data: { 'text/plain': text }, stream: name });
    }
  }

  add(output) {
    if (this.clears) {
      this.editor.clear(this.cell);
      this.clears = false;
    }
    this.editor.add(this.cell, output);
  }
}

class Editor {
  constructor(options) {
    this.options = options;
    this.cells = [];
    this.runs = [];
    /** Kinds of the messages that views have sent. */
    this.forwarded = [];
    /** Models that the kernel has shown to this window; others are shown in another form. */
    this.models = new Set();
  }

  /** Open a notebook: with its saved outputs, and a kernel if there is one, or else with saved widgets if it has some. */
  async open(saved, model, state) {
    const frame = document.createElement('iframe');
    frame.src = 'webview.html';
    document.body.append(frame);
    await new Promise(done => (frame.onload = done));
    this.frame = frame.contentWindow;
    this.theme(this.options.theme ?? 'vscode-light');
    if (model) {
      this.connect(model);
    } else if (state) {
      await this.restore(state);
    }
    for (const { code, outputs } of saved) {
      const cell = this.addCell(code);
      for (const output of outputs) {
        this.add(cell, output);
      }
    }
  }

  /** Show the widgets of a notebook file without a kernel. */
  async restore(state) {
    const model = { id: '', name: '' };
    this.copy = new Copy(model, '', () => {});
    this.widgets = new Widgets(this.frame, this.copy, this.options.scripts, state);
    const metadata = { get: () => ({ [STATE]: state }) };
    await this.widgets.manager.restoreWidgets({ metadata }, { loadKernel: false, loadNotebook: true });
    for (const id of Object.keys(state.state)) {
      this.models.add(id);
      this.widgets.wait(id).resolve(this.widgets.manager.get_model(id));
    }
  }

  /** Restart the kernel: its widgets end, and others may come. */
  async restart() {
    this.widgets.manager.dispose();
    this.copy.kernel.dispose();
    this.runs = [];
    this.models.clear();
    await this.kernel.restart();
    this.attach();
  }

  /** Give the frame a kernel of its own. */
  attach() {
    this.copy = new Copy(this.kernel.model, this.kernel.clientId, data => this.forward(data));
    this.widgets = new Widgets(this.frame, this.copy, this.options.scripts);
  }

  connect(model) {
    const editor = this;
    class Tapped extends WebSocket {
      constructor(url) {
        super(url);
        this.addEventListener('message', event => editor.copy.take(event.data));
      }
      send(data) {
        if (typeof data === 'string' && data.includes('execute_request')) {
          editor.copy.mirror(deserialize(data));
        }
        super.send(data);
      }
    }
    const { baseUrl, token } = this.options;
    const wsUrl = baseUrl.replace(/^http/, 'ws');
    const serverSettings = ServerConnection.makeSettings({ baseUrl, wsUrl, token, appendToken: true, WebSocket: Tapped });
    const clientId = crypto.randomUUID();
    this.kernel = new KernelConnection({ serverSettings, clientId, model, ...USUAL });
    this.attach();
    this.kernel.registerCommTarget('jupyter.widget', () => {});
    this.kernel.iopubMessage.connect((_, message) => this.hear(message));
    this.kernel.anyMessage.connect((_, { msg, direction }) => this.overhear(msg, direction));
  }

  /** Send a message of the frame to the kernel. */
  forward(data) {
    const message = typeof data === 'string' ? JSON.parse(data) : deserialize(data);
    this.forwarded.push(message.content?.data?.content?.kind ?? '');
    if (message.channel === 'control') {
      this.kernel.sendControlMessage(message);
    } else {
      this.kernel.sendShellMessage(message);
    }
  }

  hear(message) {
    const id = modelOf(message);
    if (id) {
      this.models.add(id);
    }
    for (const run of this.runs) {
      if (run.owned.has(message.parent_header?.msg_id)) {
        run.take(message);
      }
    }
  }

  /** What a widget of a cell asks for after the end of the cell is answered in that cell. */
  overhear(message, direction) {
    if (direction === 'send' && KernelMessage.isCommMsgMsg(message)) {
      for (const run of this.runs) {
        if (run.done && run.comms.has(message.content.comm_id)) {
          run.owned.add(message.header.msg_id);
        }
      }
    }
  }

  addCell(code) {
    const element = this.frame.document.createElement('section');
    const label = this.frame.document.createElement('pre');
    label.textContent = code;
    label.className = 'input';
    element.append(label);
    this.frame.document.getElementById('container').append(element);
    const cell = { code, element, outputs: [], running: false };
    this.cells.push(cell);
    return cell;
  }

  /** Start a cell; return its number. */
  run(code, number = this.cells.length) {
    const cell = this.cells[number] ?? this.addCell(code);
    this.clear(cell);
    const run = new Run(this, cell);
    this.runs = [...this.runs.filter(each => each.cell !== cell), run];
    const content = { code, silent: false, stop_on_error: false, allow_stdin: true, store_history: true };
    cell.running = true;
    const request = this.kernel.requestExecute(content, false, { cellId: `vscode-notebook-cell:/book.ipynb#${number}` });
    run.owned.add(request.msg.header.msg_id);
    request.done.finally(() => {
      run.done = true;
      cell.running = false;
    });
    return number;
  }

  add(cell, output) {
    output.element = this.frame.document.createElement('div');
    output.element.className = 'output';
    cell.element.append(output.element);
    cell.outputs.push(output);
    this.show(output);
  }

  update({ data, transient }) {
    for (const cell of this.cells) {
      for (const output of cell.outputs.filter(each => each.display && each.display === transient.display_id)) {
        output.data = data;
        this.show(output);
      }
    }
  }

  /** Outputs leave the page, but their widgets do not end: VS Code may show them again. */
  clear(cell) {
    for (const { element } of cell.outputs) {
      element.remove();
    }
    cell.outputs = [];
  }

  show(output) {
    const { element, data } = output;
    element.replaceChildren();
    for (const kind of ORDER.filter(each => each in data)) {
      if (kind === WIDGET && !this.models.has(data[kind].model_id)) {
        continue;
      }
      element.dataset.kind = kind;
      if (kind === WIDGET) {
        const region = this.frame.document.createElement('div');
        region.className = 'cell-output-ipywidget-background';
        region.setAttribute('role', 'region');
        region.setAttribute('aria-label', 'Interactive widget output');
        region.tabIndex = 0;
        element.append(region);
        output.view = this.widgets.render(data[kind].model_id, region);
      } else if (kind === 'text/html') {
        element.innerHTML = data[kind];
      } else {
        const text = this.frame.document.createElement('pre');
        text.textContent = data[kind];
        element.append(text);
      }
      return;
    }
  }

  theme(name) {
    const classes = name === 'vscode-high-contrast-light' ? [name, 'vscode-high-contrast'] : [name];
    for (const body of [document.body, this.frame.document.body]) {
      body.classList.remove(...Object.keys(THEMES));
      body.classList.add(...classes);
      body.dataset.vscodeThemeKind = name;
    }
    this.frame.document.documentElement.style.removeProperty('--vscode-contrastBorder');
    for (const [key, value] of Object.entries(THEMES[name])) {
      this.frame.document.documentElement.style.setProperty(key, value);
    }
  }

  /** Return what a saved notebook has. */
  saved() {
    return this.cells.map(({ code, outputs }) => ({
      code,
      outputs: outputs.map(({ data, display, stream }) => ({ data, display, stream }))
    }));
  }
}

window.Editor = Editor;
