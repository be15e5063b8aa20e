// What JupyterLab expects of a prebuilt extension: a container as webpack's module federation makes them, whose
// `init` takes JupyterLab's own modules and whose `get` returns a factory of the extension's. docs/decisions/0062.
(() => {
  const shared = ["SHARED"];
  const modules = {};
  let scope;
  let body;

  /** Return the newest version of a module, as a factory; JupyterLab offers one of each of its own. */
  function newest(name) {
    const offers = Object.entries(scope[name] ?? {});
    if (!offers.length) {
      throw new Error(`${"NAME"} needs ${name}, which this JupyterLab does not offer; JupyterLab 4.2 or newer is required`);
    }
    const key = version => version.split(/[.+-]/).map(part => part.padStart(8, '0')).join('.');
    offers.sort(([one, first], [other, second]) =>
      Number(first.loaded ?? 0) - Number(second.loaded ?? 0) || (key(one) < key(other) ? -1 : 1));
    return offers.at(-1)[1].get();
  }

  async function load() {
    await Promise.all(shared.map(async name => { modules[name] = (await newest(name))(); }));
    const module = { exports: {} };
    run(module, module.exports, name => modules[name]);
    return module.exports;
  }

  function run(module, exports, require) {
    "BODY";
  }

  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB["NAME"] = {
    init: given => { scope = given; },
    get: async () => {
      body ??= load();
      const exports = await body;
      return () => exports;
    }
  };
})();
