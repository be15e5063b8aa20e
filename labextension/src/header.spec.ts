import { describe, expect, test } from 'vitest';
import { headerOf, headerStart, isMeshCell, targetOf, withTarget } from './header';

describe('the header of a cell', () => {
  test.each([
    ['%%mesh', true],
    ['%%mesh trainers\nx', true],
    ['%%mesh[0]', true],
    ['%%meshes', false],
    [' %%mesh', false],
    ['%mesh up', false],
    ['# all ranks\n\n%%mesh\nx', true],
    ['%%time\n%%mesh [0]\nx', true],
    ['x = 1\n%%mesh', false]
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

  test('is below comments and other magics', () => {
    const source = '# all\n%%time\n%%mesh [0]\nx';
    expect(headerOf(source)).toBe('%%mesh [0]');
    expect(source.slice(headerStart(source))).toBe('%%mesh [0]\nx');
  });

  test('is all of a cell that has one line', () => {
    expect([headerOf('a\nb'), headerOf('a'), headerOf('')]).toEqual(['a', 'a', '']);
  });
});
