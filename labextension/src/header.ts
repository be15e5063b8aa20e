/** The header of a `%%mesh` cell: its first line, below comments and other cell magics. */

const ABOVE = /^(?:[ \t]*(?:#.*)?\n|%%(?!mesh\b).*\n)*/;

/** Return the place at which the header of a cell begins. */
export function headerStart(source: string): number {
  return source.match(ABOVE)?.[0].length ?? 0;
}

/** Return whether a cell goes to ranks. */
export function isMeshCell(source: string): boolean {
  return /^%%mesh(\s|$|\[)/.test(source.slice(headerStart(source)));
}

/** Return the header of a cell. */
export function headerOf(source: string): string {
  const start = headerStart(source);
  const end = source.indexOf('\n', start);
  return source.slice(start, end < 0 ? undefined : end);
}

const TARGET = /^(%%mesh)(\s+(?![-#])[^\s[]*(?:\[[^\]]*\])?|\s*\[[^\]]*\])?/;

/** A cell that spawns actors, and the ranks that it names. */
const SPAWN = /^%%mesh\s+spawn\s+[^-[\s]/;
const ON = /\s+--on[\s=]+([^-\s][^\s[]*(?:\[[^\]]*\])?|\[[^\]]*\])/;

/** Return the part of a line that names mesh and ranks, as in `trainers[gpus=0:4]`; empty for all of the current one. */
export function targetOf(line: string): string {
  if (SPAWN.test(line)) {
    return line.match(ON)?.[1] ?? '';
  }
  return (line.match(TARGET)?.[2] ?? '').trim();
}

/** Return the line with another mesh and other ranks; its options stay. */
export function withTarget(line: string, target: string): string {
  if (SPAWN.test(line)) {
    const bare = line.replace(ON, '').trim();
    const head = bare.replace(/\s+--new$/, '');
    return [head, target.trim() && `--on ${target.trim()}`, head === bare ? '' : '--new'].filter(Boolean).join(' ');
  }
  const rest = line.slice(line.match(TARGET)?.[0].length ?? '%%mesh'.length).trim();
  return ['%%mesh', target.trim(), rest].filter(Boolean).join(' ');
}
