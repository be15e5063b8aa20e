/** Translated text: the part of JupyterLab's TranslationBundle that the views need. */

export interface Trans {
  /** Translate a text, whose %1, %2, … stand for the arguments. */
  __(text: string, ...args: (string | number)[]): string;
  /** The same, with the number as %1, in singular or plural. */
  _n(one: string, many: string, count: number, ...args: (string | number)[]): string;
}

function fill(text: string, args: (string | number)[]): string {
  return text.replace(/%(\d)/g, (_, at) => String(args[Number(at) - 1] ?? ''));
}

/** As written. */
export const ENGLISH: Trans = {
  __: (text, ...args) => fill(text, args),
  _n: (one, many, count, ...args) => fill(count === 1 ? one : many, [count, ...args])
};
