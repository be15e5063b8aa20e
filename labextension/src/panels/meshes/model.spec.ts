import { Signal } from '@lumino/signaling';
import { describe, expect, test } from 'vitest';
import type { MeshSummary } from '../../protocol';
import { rankRow, snapshotOf, TestChannel } from '../../testing';
import type { IMeshes, LinkState } from '../../tokens';
import { ENGLISH } from '../../view/trans';
import { emptyText, meshText, whyNot } from './body';
import { nextFailed, PanelModel, pickMesh } from './model';

const summary = (uid: string, change: Partial<MeshSummary> = {}): MeshSummary => ({
  uid,
  name: uid,
  ranks: 8,
  failed: 0,
  running: 0,
  ...change
});

class TestLink extends TestChannel {
  state: LinkState = 'live';
  meshes = [summary('a'), summary('mesh-1', { current: true })];
  reconnected = new Signal<this, void>(this);
}

function makeService() {
  const service = { current: null as TestLink | null };
  const changed = new Signal(service);
  return Object.assign(service, { changed, added: changed, links: [] });
}

function makePanel(): [PanelModel, TestLink, ReturnType<typeof makeService>] {
  const service = makeService();
  const link = new TestLink();
  service.current = link;
  const model = new PanelModel(service as unknown as IMeshes);
  model.setShown(true);
  return [model, link, service];
}

describe('the Meshes panel', () => {
  test('opens the current mesh, and closes it when hidden', () => {
    const [model, link] = makePanel();
    expect(link.sent).toMatchObject([{ kind: 'open', uid: 'mesh-1' }]);
    model.setShown(false);
    expect(link.kinds).toEqual(['open', 'close']);
    expect([model.session, link.listeners]).toEqual([null, 0]);
  });

  test('shows the mesh that a person has chosen, until it is gone', () => {
    const [model, link, service] = makePanel();
    model.choose('a');
    expect(link.sent.at(-1)).toMatchObject({ kind: 'open', uid: 'a' });
    link.meshes = [summary('mesh-1')];
    service.changed.emit(undefined);
    expect(model.session?.uid).toBe('mesh-1');
  });

  test('follows the current notebook', () => {
    const [model, link, service] = makePanel();
    service.current = new TestLink();
    service.changed.emit(undefined);
    expect(link.kinds).toEqual(['open', 'close']);
    expect(service.current.kinds).toEqual(['open']);
    expect(model.current).toBe(service.current);
  });

  test('keeps the last picture while the kernel restarts, and opens again', () => {
    const [model, link, service] = makePanel();
    link.tell(snapshotOf(4));
    Object.assign(link, { state: 'dead', meshes: [] });
    service.changed.emit(undefined);
    expect(model.session?.link).toBe('lost');
    Object.assign(link, { state: 'live', meshes: [summary('mesh-9')] });
    service.changed.emit(undefined);
    expect([model.session?.uid, model.session?.link]).toEqual(['mesh-9', 'connecting']);
  });

  test('asks for everything again after a lost connection', () => {
    const [, link] = makePanel();
    link.reconnected.emit();
    expect(link.kinds).toEqual(['open', 'open']);
  });

  test('steps through failed ranks', () => {
    const [model, link] = makePanel();
    link.tell(
      snapshotOf(4, { ranks: [0, 1, 2, 3].map(rank => rankRow(rank, { state: rank % 2 ? 'failed' : 'idle' })) })
    );
    const pinned = [1, 1, 1, -1].map(direction => {
      model.stepFailed(direction as 1 | -1);
      return model.session?.pinned;
    });
    expect(pinned).toEqual([1, 3, 1, 3]);
    expect(nextFailed([], 2, 1)).toBe(-1);
  });

  test('steps to a failed rank as soon as a panel that opens knows its ranks', () => {
    const [model, link] = makePanel();
    model.stepFailed(1);
    expect(model.session?.pinned).toBe(-1);
    link.tell(
      snapshotOf(4, { ranks: [0, 1, 2, 3].map(rank => rankRow(rank, { state: rank % 2 ? 'failed' : 'idle' })) })
    );
    expect(model.session?.pinned).toBe(1);
    link.tell(snapshotOf(4));
    expect(model.session?.pinned).toBe(1);
  });

  test('says why a command cannot act', () => {
    const [model, link, service] = makePanel();
    expect(whyNot(model, ENGLISH)).toBe('');
    model.setShown(false);
    expect([model.session, whyNot(model, ENGLISH)]).toEqual([null, '']);
    link.meshes = [summary('far', { owner: 'other.ipynb' })];
    model.choose('far');
    expect(whyNot(model, ENGLISH)).toContain('belongs to other.ipynb');
    link.state = 'none';
    expect(whyNot(model, ENGLISH)).toContain('Select the Monarch kernel');
    link.state = 'dead';
    expect(whyNot(model, ENGLISH)).toContain('not running');
    link.state = 'restarting';
    expect(whyNot(model, ENGLISH)).toContain('is restarting');
    service.current = null;
    service.changed.emit(undefined);
    expect(whyNot(model, ENGLISH)).toContain('Open a notebook');
  });

  test('says what to do when there is no mesh', () => {
    const [model, link, service] = makePanel();
    const text = (state: LinkState) => {
      Object.assign(link, { state, meshes: [] });
      service.changed.emit(undefined);
      return emptyText(model, ENGLISH);
    };
    expect(text('live')).toContain('Start one with %mesh up');
    expect(text('connecting')).toContain('Waiting');
    expect(text('none')).toContain('Select the Monarch kernel');
    expect(text('dead')).toContain('not running');
    expect(text('restarting')).toContain('is restarting');
    service.current = null;
    service.changed.emit(undefined);
    expect(emptyText(model, ENGLISH)).toContain('Open a notebook');
  });

  test('shows a mesh of another kernel only when it is chosen', () => {
    const [model, link, service] = makePanel();
    link.meshes = [summary('far', { owner: 'other.ipynb' })];
    service.changed.emit(undefined);
    expect([model.session, emptyText(model, ENGLISH)]).toEqual([null, expect.stringContaining('No mesh is running')]);
    model.choose('far');
    expect(model.session?.uid).toBe('far');
    expect(emptyText(model, ENGLISH)).toBe('');
  });

  test('says how to attach a detached mesh', () => {
    const [model, link, service] = makePanel();
    link.meshes = [summary('mesh-1'), summary('kept', { detached: true, owner: 'free until noon', ranks: 0 })];
    service.changed.emit(undefined);
    model.choose('kept');
    expect([model.session, emptyText(model, ENGLISH)]).toEqual([null, expect.stringContaining('%mesh attach kept')]);
    link.meshes = [summary('kept', { detached: true, taken: true, owner: 'process 12', ranks: 0 })];
    service.changed.emit(undefined);
    expect(emptyText(model, ENGLISH)).toBe(
      'This mesh is in use by process 12. When that has ended, run %mesh attach kept to attach it here.'
    );
  });

  test('sums up a mesh in a line', () => {
    expect(meshText(summary('a', { failed: 1, running: 7 }), ENGLISH)).toBe('8 ranks, 1 dead');
    expect(meshText(summary('a', { running: 7, owner: 'train.ipynb' }), ENGLISH)).toBe(
      '8 ranks, 7 running, train.ipynb'
    );
    expect(meshText(summary('a', { ranks: 0, detached: true, owner: 'free until noon' }), ENGLISH)).toBe(
      'free until noon'
    );
    expect(pickMesh([], '')).toBeNull();
  });
});
