// A training run as a kernel sends it, made up, the same at each call: rank 5 is a straggler, and one rank fails.

/** Numbers from 0 to 1, the same each time. */
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const SHAPES = {
  1: { labels: ['gpus'], sizes: [1] },
  8: { labels: ['gpus'], sizes: [8] },
  64: { labels: ['hosts', 'gpus'], sizes: [8, 8] },
  1024: { labels: ['hosts', 'gpus'], sizes: [128, 8] }
};
const STRAGGLER = 5;
const ALL = ['interrupt', 'pause', 'heal', 'kill', 'stacks'];

export function snapshot(count, now = Date.now() / 1000) {
  const shape = SHAPES[count];
  const perHost = shape.sizes.at(-1);
  const next = random(count);
  const ranks = Array.from({ length: count }, (_, rank) => row(rank, count, now, next));
  const numbers = ranks.map(each => each.rank);
  const hosts = ranks.map(({ rank }) => (shape.sizes.length > 1 ? `node-${Math.floor(rank / perHost)}` : 'node-0'));
  return {
    kind: 'snapshot',
    now,
    number: 1,
    mesh: { uid: 'mesh-1', name: 'trainers', ...shape, hosts, started: now - 754, actions: ALL },
    ranks,
    calls: [
      { call: 7, title: 'cell [4]', cell: 4, started: now - 48, ranks: numbers, left: numbers }
    ],
    spans: ranks.flatMap(({ rank }) => spans(rank, count, now)),
    points: points(count),
    bars: [
      {
        bar: 'epoch 2',
        unit: 'batches',
        ranks: numbers,
        done: numbers.map(rank => (rank === STRAGGLER ? 412 : 431 - (rank % 7))),
        total: [1000],
        left: numbers,
        started: now - 40
      }
    ]
  };
}

function row(rank, count, now, next) {
  const slow = rank === STRAGGLER || count === 1;
  const common = {
    rank, since: now - 0.4 - 3 * next(), call: 'cell [4]', place: 'cell [4] line 7', pid: 41_200 + rank,
    device: `cuda:${rank % 8}`, load: 0.72 + 0.27 * next(), rss: 3.1e9 + 2e8 * next(), gpu_memory: 3.62e10 + 1e9 * next(),
    tensors: { model: 1.24e10, optimizer: 2.48e10 }
  };
  if (count > 1 && rank === count - 2) {
    return { ...common, state: 'failed', load: 0, reason: 'CUDA out of memory: tried to allocate 2.5 GB', since: now - 31 };
  }
  if (count >= 64 && rank % 61 === 17) {
    return { ...common, state: 'blocked', load: 0.3, place: 'cell [4] line 9' };
  }
  if (count >= 64 && rank % 97 === 40) {
    return { ...common, state: 'idle', call: '', place: '', load: 0 };
  }
  if (rank === 3 && count > 1) {
    return { ...common, state: 'running', restarts: 2 };
  }
  if (slow || next() < 0.4) {
    return { ...common, state: 'running', since: now - (slow ? 12 : 0.8) };
  }
  return { ...common, state: 'collective', collective: 'all_reduce #412', load: 0.12 * next() };
}

function spans(rank, count, now) {
  const made = [];
  const step = 6;
  const work = rank === STRAGGLER || count === 1 ? 5.4 : 2.6 + 0.25 * (rank % 4);
  for (let begin = now - 60; begin < now - 0.01; begin += step) {
    const middle = Math.min(begin + work, now);
    made.push({ rank, state: 'running', begin, end: middle >= now ? 0 : middle, title: 'cell [4]' });
    if (middle < now) {
      const end = begin + step >= now ? 0 : begin + step;
      made.push({ rank, state: 'collective', begin: middle, end, title: 'all_reduce' });
    }
  }
  if (count > 1 && rank === count - 2) {
    return [...made.filter(span => span.begin < now - 31).map(span => ({ ...span, end: Math.min(span.end || now, now - 31) })),
      { rank, state: 'failed', begin: now - 31, title: '' }];
  }
  return made;
}

function points(count) {
  const made = [];
  for (let rank = 0; rank < Math.min(count, 64); rank++) {
    const next = random(rank + 1);
    const steps = Array.from({ length: 120 }, (_, at) => at * 5);
    const loss = steps.map(step => 2.2 * Math.exp(-step / 180) + 0.35 + 0.16 * (next() - 0.5) + (rank === STRAGGLER ? 0.08 : 0));
    made.push({ name: 'loss', rank, steps, values: loss.map((value, at) => (rank === 2 && at > 50 && at < 60 ? null : value)) });
    made.push({ name: 'tokens/s', rank, steps, values: steps.map(() => (rank === STRAGGLER ? 9_100 : 18_200) + 900 * next()) });
  }
  return made;
}

/** A change of every rank. */
export function patch(count, after, now = Date.now() / 1000) {
  const next = random(after * 7919);
  const ranks = Array.from({ length: count }, (_, rank) => ({ ...row(rank, count, now, next), load: next() }));
  const some = ranks.filter(each => each.rank % 8 === after % 8);
  return {
    kind: 'patch', uid: 'mesh-1', now, after, number: after + 1, ranks,
    spans: some.map(({ rank, state }) => ({ rank, state, begin: now, title: 'cell [4]' }))
  };
}

export function details(rank) {
  return {
    kind: 'details', uid: 'mesh-1', rank,
    stack: ['File "cell [4]", line 7, in train_step', '    loss = model(x, y)', 'File "model.py", line 88, in forward', '    x = block(x)', 'File "model.py", line 41, in forward', '    return self.proj(y.transpose(1, 2).reshape(B, T, C))'],
    lines: [
      { ranks: [rank], stream: 'stdout', text: 'step 410 loss 0.4121' },
      { ranks: [rank], stream: 'stdout', text: 'step 411 loss 0.4098' },
      { ranks: [rank], stream: 'stderr', text: 'UserWarning: the dataloader is slow: 1.9 s for a batch' }
    ],
    tensors: [
      { name: 'model.embed.weight', shape: [50304, 768], dtype: 'torch.bfloat16', device: 'cuda:5', norm: 812.4 },
      { name: 'model.head.weight', shape: [50304, 768], dtype: 'torch.bfloat16', device: 'cuda:5' },
      { name: 'grad.blocks.11', shape: [768, 3072], dtype: 'torch.float32', device: 'cuda:5', norm: null, nans: 14 },
      { name: 'x', shape: [32, 1024], dtype: 'torch.int64', device: 'cuda:5', norm: 301.2 }
    ]
  };
}

/** A widget's model that answers as a kernel does, and sends a patch every `every` ms. */
export function fakeModel(count, every = 0) {
  const handlers = new Set();
  const sent = [];
  let number = 1;
  const tell = message => handlers.forEach(handler => handler(message));
  const model = {
    sent,
    tell,
    // The ranks that the view is of: all.
    get: name => (name === 'state' ? '' : []),
    on: (_, handler) => handlers.add(handler),
    off: (_, handler) => handlers.delete(handler),
    send: message => {
      sent.push(message);
      queueMicrotask(() => {
        if (message.kind === 'open') {
          tell({ ...snapshot(count), number });
        } else if (message.kind === 'pin' && message.rank >= 0) {
          tell(details(message.rank));
        } else if (message.kind === 'act') {
          tell({ kind: 'done', id: message.id, ok: true, text: `${message.action}: done` });
        }
      });
    }
  };
  if (every) {
    setInterval(() => tell(patch(count, number++)), every);
  }
  return model;
}
