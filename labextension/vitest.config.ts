import { readFileSync } from 'node:fs';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  root: import.meta.dirname,
  // As esbuild loads them: the text of the file.
  plugins: [
    {
      name: 'text',
      enforce: 'pre',
      load: (id: string) =>
        /\.(css|svg)$/.test(id)
          ? { code: `export default ${JSON.stringify(readFileSync(id, 'utf8'))}`, moduleType: 'js' }
          : null
    }
  ],
  oxc: { jsx: { runtime: 'automatic', importSource: 'preact' } },
  test: { environment: 'happy-dom', include: ['src/**/*.spec.{ts,tsx}'] }
});
