// Builds the widget (one file without imports) and the JupyterLab extension from the same sources.

import { createHash } from 'node:crypto';
import { copyFileSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build, context } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const root = dirname(here);
const info = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
const out = join(root, info.jupyterlab.outputDir);
const widget = join(root, 'monarch_kernel', 'views', 'static', 'meshview.js');
/** The oldest versions of JupyterLab's packages that the extension works with: those of JupyterLab 4.2. */
const OLDEST = { apputils: '^4.3.0', services: '^7.2.0', default: '^4.2.0' };

const common = {
  bundle: true,
  target: 'es2021',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  loader: { '.css': 'text', '.svg': 'text' },
  legalComments: 'none',
  minify: process.argv.includes('--minify'),
  logLevel: 'warning'
};

const forWidget = {
  ...common,
  entryPoints: [join(here, 'src', 'widget.ts')],
  format: 'esm',
  outfile: widget
};

const forLab = {
  ...common,
  entryPoints: [join(here, 'src', 'index.ts')],
  format: 'cjs',
  external: ['@jupyterlab/*', '@lumino/*'],
  metafile: true,
  write: false,
  outdir: out,
  plugins: [{ name: 'container', setup: builder => builder.onEnd(result => result.errors.length || writeLab(result)) }]
};

/** Write the extension as JupyterLab loads it: a container with the interface of webpack's module federation. */
function writeLab(result) {
  const imports = Object.values(result.metafile.outputs).flatMap(each => each.imports);
  const shared = [...new Set(imports.filter(each => each.external).map(each => each.path))].sort();
  const text = readFileSync(join(here, 'container.js'), 'utf8')
    .replaceAll('"NAME"', () => JSON.stringify(info.name))
    .replace('["SHARED"]', () => JSON.stringify(shared))
    .replace('"BODY";', () => result.outputFiles[0].text);
  const hash = createHash('sha256').update(text).digest('hex').slice(0, 20);
  const fresh = `${out}.new`;
  rmSync(fresh, { recursive: true, force: true });
  mkdirSync(join(fresh, 'static'), { recursive: true });
  const file = `static/remoteEntry.${hash}.js`;
  writeFileSync(join(fresh, file), text);
  writeFileSync(join(fresh, 'package.json'), `${JSON.stringify(describe(shared, file), null, 2)}\n`);
  copySchemas(join(fresh, 'schemas', info.name));
  rmSync(out, { recursive: true, force: true });
  renameSync(fresh, out);
}

/** Return the metadata that JupyterLab reads. */
function describe(shared, file) {
  const { name, version, description, license } = info;
  const range = each => OLDEST[each.slice('@jupyterlab/'.length)] ?? OLDEST.default;
  const lab = shared.filter(each => each.startsWith('@jupyterlab/'));
  const dependencies = Object.fromEntries(lab.map(each => [each, range(each)]));
  const jupyterlab = { ...info.jupyterlab, _build: { load: file, extension: './extension' } };
  return { name, version, description, license, keywords: ['jupyterlab-extension'], dependencies, jupyterlab };
}

function copySchemas(target) {
  mkdirSync(target, { recursive: true });
  for (const name of readdirSync(join(here, 'schema'))) {
    copyFileSync(join(here, 'schema', name), join(target, name));
  }
  copyFileSync(join(root, 'package.json'), join(target, 'package.json.orig'));
}

mkdirSync(dirname(widget), { recursive: true });
if (process.argv.includes('--watch')) {
  await Promise.all([forWidget, forLab].map(async options => (await context(options)).watch()));
} else {
  await Promise.all([build(forWidget), build(forLab)]);
}
