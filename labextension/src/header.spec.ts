import { describe, expect, test } from 'vitest';
import { firstLine, isMeshCell, targetOf, withTarget } from './header';

describe('the first line of a cell', () => {
  test.each([
    ['%%mesh', true],
    ['%%mesh trainers\nx', true],
    ['%%mesh[0]', true],
    ['%%meshes', false],
    [' %%mesh', false],
    ['%mesh up', false]
  ])('%j goes to ranks: %j', (source, answer) => {
    expect(isMeshCell(source)).toBe(answer);
  });

  test.each([
    ['%%mesh', '', 'a[0]', '%%mesh a[0]'],
    ['%%mesh --timeout 10', '', 'a', '%%mesh a --timeout 10'],
    ['%%mesh trainers', 'trainers', '', '%%mesh'],
    ['%%mesh trainers[gpus=0:4, hosts=1] --out it', 'trainers[gpus=0:4, hosts=1]', '[0]', '%%mesh [0] --out it'],
    ['%%mesh [::2] --out it', '[::2]', 'b', '%%mesh b --out it'],
    ['%%mesh[0]', '[0]', '', '%%mesh'],
    ['%%mesh spawn aa', '', 'b[0]', '%%mesh spawn aa --on b[0]'],
    ['%%mesh spawn aa(x=[1]) --on b[0:2] --new', 'b[0:2]', '', '%%mesh spawn aa(x=[1]) --new'],
    ['%%mesh spawn aa --on b', 'b', '[1]', '%%mesh spawn aa --on [1]']
  ])('%j names %j; with %j it is %j', (line, target, other, result) => {
    expect(targetOf(line)).toBe(target);
    expect(withTarget(line, other)).toBe(result);
  });

  test('is all of a cell that has one line', () => {
    expect([firstLine('a\nb'), firstLine('a'), firstLine('')]).toEqual(['a', 'a', '']);
  });
});
