import { describe, expect, test } from 'vitest';
import { meshRow } from '../testing';
import { layOut, makeBoxes } from './layout';

const hosts = (count: number, each: number) =>
  Array.from({ length: count }, (_, rank) => `node-${Math.floor(rank / each)}`);

describe('layout', () => {
  test('each host is a box with its name and ranks', () => {
    const boxes = makeBoxes(meshRow(8, { labels: ['hosts', 'gpus'], sizes: [2, 4], hosts: hosts(8, 4) }));
    expect(boxes).toEqual([
      { title: 'node-0', ranks: [0, 1, 2, 3], columns: 4 },
      { title: 'node-1', ranks: [4, 5, 6, 7], columns: 4 }
    ]);
  });

  test('hosts of a mesh that runs on one machine are boxes too', () => {
    const boxes = makeBoxes(meshRow(4, { labels: ['hosts', 'gpus'], sizes: [2, 2] }));
    expect(boxes.map(box => [box.title, box.ranks])).toEqual([
      ['hosts 0', [0, 1]],
      ['hosts 1', [2, 3]]
    ]);
  });

  test('the innermost axis gives the columns', () => {
    expect(makeBoxes(meshRow(12, { labels: ['dp', 'tp'], sizes: [3, 4] }))[0].columns).toBe(4);
  });

  test.each([1, 8, 64, 1024, 4096])('%d ranks fit the width, each once', count => {
    for (const width of [220, 480, 960]) {
      const { boxes, size } = layOut(meshRow(count), width);
      expect(boxes.flatMap(box => box.ranks)).toEqual(Array.from({ length: count }, (_, rank) => rank));
      const widest = Math.max(...boxes.map(box => box.columns)) * (size.width + size.gap) - size.gap;
      expect(widest).toBeLessThanOrEqual(width);
    }
  });

  test('the grid is as wide as its place, unless tiles would be too wide', () => {
    const wide = (count: number, width: number) => {
      const { boxes, size } = layOut(meshRow(count), width);
      return boxes[0].columns * (size.width + size.gap) - size.gap;
    };
    expect([wide(8, 960), wide(8, 560), wide(1, 960)]).toEqual([958, 560, 294]);
    const { size } = layOut(meshRow(64, { labels: ['hosts', 'gpus'], sizes: [8, 8], hosts: hosts(64, 8) }), 960);
    // Three boxes of four columns.
    expect(3 * (4 * (size.width + size.gap) - size.gap + 20) + 2 * 8).toBeGreaterThan(945);
  });

  test('text leaves the tiles before it is too small to read', () => {
    const details = [1, 8, 64, 1024].map(
      count =>
        layOut(
          meshRow(count, {
            labels: ['hosts', 'gpus'],
            sizes: [Math.ceil(count / 8), Math.min(count, 8)],
            hosts: hosts(count, 8)
          }),
          960
        ).size.detail
    );
    expect(details).toEqual(['full', 'full', 'number', 'dot']);
  });
});
