import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { test } from 'node:test';
import { codeLength, doing, explained, follow, grouped, latest, mainThread, onRanks, parse, parseRanks, place, ranges, runWords, status } from '../src/model';

const SNAPSHOT = {
    kind: 'run',
    verdict: { text: 'rank 1 is slow in data', level: 'warning', rank: 1 },
    run: '20260101-1',
    live: true,
    job: { script: 'train.py' },
    ranks: [],
    findings: [],
};

test('a line that is no snapshot is none', () => {
    for (const line of ['', 'ddpdoctor: no run', '{}', 'null', '[]', '{"ranks": [], "findings": []}']) {
        assert.equal(parse(line), undefined, line);
    }
    assert.equal(parse(JSON.stringify(SNAPSHOT))?.run, '20260101-1');
});

test('a rank is described by what is known of it', () => {
    const gpu = { index: 0, utilization: 0.514, memory_used: 3 * 2 ** 30 };
    const rank = { rank: 1, state: 'running', step: 7, phase: 'wait', collective: 'all_reduce', site: '/a/b.py:3', gpu };
    assert.equal(doing(rank), 'step 7 · all_reduce · b.py:3 · GPU 0 51 % 3.0 GiB');
    assert.equal(doing({ rank: 0, state: 'dead', said: 'killed by SIGKILL' }), 'killed by SIGKILL');
    const held = { ...rank, state: 'debugger', said: 'has stopped in the debugger at b.py:4' };
    assert.equal(doing(held), 'has stopped in the debugger at b.py:4 · step 7 · GPU 0 51 % 3.0 GiB');
    assert.equal(doing({ rank: 0 }), '');
});

test('a place is a path and a line', () => {
    assert.deepEqual(place('C:\\x\\a.py:12'), { path: 'C:\\x\\a.py', line: 12 });
    assert.equal(place('a.py'), undefined);
    assert.equal(place(undefined), undefined);
});

test('code ends before its comment', () => {
    assert.equal(codeLength('    x = 1  # one'), 9);
    assert.equal(codeLength("print('a # b')  "), 14);
    assert.equal(codeLength('x = 1'), 5);
});

test('the status bar says the verdict of a run alone', () => {
    const live = parse(JSON.stringify(SNAPSHOT));
    assert.deepEqual(status(live), { text: '$(warning) ddpdoctor: rank 1 is slow in data', level: 'warning' });
    assert.equal(status({ ...live!, kind: 'machine' }), undefined);
    assert.equal(status(undefined), undefined);
});

test('a hover has the evidence and the fix', () => {
    const finding = {
        ...{ id: 'a', code: 'DDP101', severity: 'error' as const, message: 'a parameter is unused', ranks: [0] },
        ...{ evidence: ['step 3'], fix: 'use it' },
    };
    assert.equal(explained(finding), 'a parameter is unused\n  • step 3\nFix: use it');
});

test('answers are grouped, the odd ones marked', () => {
    const values = ['0.5', '0.5', 'nan', '0.5'];
    assert.deepEqual(
        grouped(values.map((value, rank) => ({ rank, value })).reverse()),
        [
            { ranks: [0, 1, 3], value: '0.5', odd: false },
            { ranks: [2], value: 'nan', odd: true },
        ],
    );
    assert.equal(ranges([3, 1, 0, 7]), '0-1, 3, 7');
});

test('ranks are read as they are written', () => {
    assert.deepEqual(parseRanks('0, 2-3'), [0, 2, 3]);
    for (const text of ['', 'a', '1,', '3-1', '-1']) {
        assert.equal(parseRanks(text), undefined, text);
    }
});

test('the condition of a breakpoint holds on its ranks alone', (context) => {
    const python = process.env['PYTHON'] ?? 'python3';
    if (spawnSync(python, ['-c', 'import torch']).status !== 0) {
        return context.skip(`${python} has no torch`);
    }
    const code = `print(${onRanks([1])}, ${onRanks([0, 2])}, ${onRanks([1], '1 > 2')})`;
    const done = spawnSync(python, ['-c', code], { env: { ...process.env, RANK: '1' }, encoding: 'utf8' });
    assert.equal(done.stdout.trim(), 'True False False', done.stderr);
});

test('F5 runs the job with as many ranks as are wanted', () => {
    const words = runWords({ program: 'a.py', args: ['--lr', '1'], ranks: 4 }, 6000);
    const options = ['run', '--wait-for-attach', '--stop-with-debugger', '--no-vscode', '--debug-port', '6001'];
    assert.deepEqual(words, [...options, '--nproc-per-node', '4', 'a.py', '--lr', '1']);
    const own = runWords({ program: 'a.py', launcher: ['--nproc-per-node=8'] }, 6000);
    assert.deepEqual(own, [...options, '--nproc-per-node=8', 'a.py']);
});

test('a rank that goes on has no stopped thread, whoever continued it', () => {
    const stopped = new Set<number>();
    const event = (name: string, body: object) => follow(stopped, { type: 'event', event: name, body });
    assert.equal(event('stopped', { threadId: 3, allThreadsStopped: false }), true);
    assert.equal(event('output', {}), false);
    assert.equal(follow(stopped, { type: 'request', command: 'evaluate' }), false);
    assert.deepEqual([...stopped], [3]);
    // The gateway sends no event after the request for a thread in native code.
    assert.equal(follow(stopped, { type: 'request', command: 'continue' }), true);
    assert.deepEqual([...stopped], []);
    event('stopped', { threadId: 3 });
    event('stopped', { threadId: 4 });
    event('continued', { threadId: 3, allThreadsContinued: false });
    assert.deepEqual([...stopped], [4]);
});

test('the main thread is found behind the rank in its name', () => {
    const threads = [{ id: 7, name: 'rank 1: Thread-2' }, { id: 1, name: 'rank 1: MainThread' }];
    assert.equal(mainThread(threads), 1);
    assert.equal(mainThread([{ id: 7, name: 'rank 1: Thread-2' }]), 7);
});

test('a run that has ended stays until the next one', () => {
    const run = parse(JSON.stringify(SNAPSHOT))!;
    const { run: _, ...rest } = run;
    const none = { ...rest, kind: 'machine', live: false };
    assert.equal(latest(undefined, none), none);
    assert.deepEqual(latest(run, none), { ...run, live: false });
    assert.equal(latest(run, none).findings, run.findings);
    const next = { ...run, run: '20260101-2' };
    assert.equal(latest(run, next), next);
});
