/** What `ddpdoctor top --json` prints, and what the editor shows of it. No import of VS Code. */

export interface Place {
    path: string;
    line: number;
}

export type Level = 'ok' | 'info' | 'warning' | 'error';

export interface Finding {
    id: string;
    code: string;
    severity: Exclude<Level, 'ok'>;
    message: string;
    ranks: number[];
    location?: Place;
    evidence: string[];
    fix: string;
}

export interface Gpu {
    index: number;
    utilization?: number;
    memory_used?: number;
    memory_total?: number;
}

export interface Rank {
    rank: number;
    node?: string;
    state?: string;
    said?: string;
    phase?: string;
    since?: number;
    site?: string;
    collective?: string;
    step?: number;
    gpu?: Gpu;
}

/** One line of `ddpdoctor top --json --watch`; see ddpdoctor/schemas/top.json. */
export interface Snapshot {
    kind: string;
    verdict: { text?: string; level?: Level; rank?: number };
    run?: string;
    path?: string;
    live: boolean;
    state?: string;
    debug_port?: number;
    job: { script?: string; step?: number; steps?: number };
    ranks: Rank[];
    findings: Finding[];
}

/** Return the snapshot in a line of output. Undefined if it is none. */
export function parse(line: string): Snapshot | undefined {
    try {
        const found = JSON.parse(line) as Partial<Snapshot> | null;
        const whole = Array.isArray(found?.ranks) && Array.isArray(found.findings) && found.verdict;
        return whole ? (found as Snapshot) : undefined;
    } catch {
        return undefined;
    }
}

/** Return what to show after a new snapshot: the last run also while none is live. */
export function latest(before: Snapshot | undefined, now: Snapshot): Snapshot {
    return before?.run && !now.run ? { ...before, live: false } : now;
}

/** Return the place in `path:line`. Undefined if the text is none. */
export function place(site: string | undefined): Place | undefined {
    const found = /^(.+):(\d+)$/.exec(site ?? '');
    return found ? { path: found[1]!, line: Number(found[2]) } : undefined;
}

/** Return where the code of a line ends, without a comment behind it. */
export function codeLength(line: string): number {
    return line.replace(/\s+#[^'"]*$/, '').trimEnd().length;
}

/** Return ranks as people write them: `0-2, 5`. */
export function ranges(ranks: readonly number[]): string {
    const parts: [number, number][] = [];
    for (const rank of [...ranks].sort((a, b) => a - b)) {
        const last = parts.at(-1);
        if (last && rank <= last[1] + 1) {
            last[1] = rank;
        } else {
            parts.push([rank, rank]);
        }
    }
    return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(', ');
}

export function named(ranks: readonly number[]): string {
    return `${ranks.length === 1 ? 'rank' : 'ranks'} ${ranges(ranks)}`;
}

/** Return what a rank does, for one line of a tree. */
export function doing(rank: Rank): string {
    const file = place(rank.site);
    const where = [rank.collective || rank.phase, file && `${file.path.split(/[\\/]/).at(-1)}:${file.line}`];
    const parts = [
        // What is said of a rank in the debugger names its line.
        rank.said || (rank.state === 'running' ? '' : rank.state),
        rank.step === undefined ? '' : `step ${rank.step}`,
        ...(rank.said && rank.state === 'debugger' ? [] : where),
        rank.gpu && gpu(rank.gpu),
        rank.node,
    ];
    return parts.filter(Boolean).join(' · ');
}

function gpu(given: Gpu): string {
    const use = given.utilization === undefined ? '' : ` ${Math.round(given.utilization * 100)} %`;
    const gib = given.memory_used === undefined ? '' : ` ${(given.memory_used / 2 ** 30).toFixed(1)} GiB`;
    return `GPU ${given.index}${use}${gib}`;
}

/** Return the text of the status bar. */
export function status(snapshot: Snapshot | undefined): { text: string; level: Level } | undefined {
    if (!snapshot || snapshot.kind === 'machine' || !snapshot.run) {
        return undefined;
    }
    const level = snapshot.verdict.level ?? 'ok';
    const icon = { ok: 'pass', info: 'info', warning: 'warning', error: 'error' }[level] ?? 'info';
    const said = snapshot.verdict.text || snapshot.state || 'no finding';
    return { text: `$(${icon}) ddpdoctor: ${said.length > 60 ? `${said.slice(0, 59)}…` : said}`, level };
}

/** Return what a finding's hover says. */
export function explained(finding: Finding): string {
    const evidence = finding.evidence.map((line) => `  • ${line}`);
    return [finding.message, ...evidence, ...(finding.fix ? [`Fix: ${finding.fix}`] : [])].join('\n');
}

export interface Answer {
    rank: number;
    value: string;
}

/** A message between the editor and a rank's debugger. */
export interface Message {
    type?: string;
    command?: string;
    event?: string;
    body?: { threadId?: number; allThreadsContinued?: boolean };
}

const RESUMING = new Set(['continue', 'next', 'stepIn', 'stepOut']);

/** Update a rank's stopped threads by a message in either direction. Return whether it is about them. */
export function follow(stopped: Set<number>, { type, command, event, body }: Message): boolean {
    if (event === 'stopped') {
        stopped.add(body?.threadId ?? 1);
    } else if (event === 'continued' && body?.allThreadsContinued === false) {
        stopped.delete(body.threadId ?? 1);
    } else if (event === 'continued' || (type === 'request' && RESUMING.has(command ?? ''))) {
        stopped.clear(); // debugpy resumes all threads.
    } else {
        return false;
    }
    return true;
}

/** Return the number of the thread to pause. The gateway puts the rank before its name. */
export function mainThread(threads: readonly { id: number; name: string }[]): number {
    return (threads.find(({ name }) => name.endsWith('MainThread')) ?? threads[0])?.id ?? 1;
}

export interface Group {
    ranks: number[];
    value: string;
    /** Whether most ranks have another value. */
    odd: boolean;
}

/** Group the ranks by their answer, the most common first. */
export function grouped(answers: readonly Answer[]): Group[] {
    const found = new Map<string, number[]>();
    for (const { rank, value } of [...answers].sort((a, b) => a.rank - b.rank)) {
        found.set(value, [...(found.get(value) ?? []), rank]);
    }
    const groups = [...found].map(([value, ranks]) => ({ ranks, value, odd: false }));
    groups.sort((a, b) => b.ranks.length - a.ranks.length || a.ranks[0]! - b.ranks[0]!);
    return groups.map((group, index) => ({ ...group, odd: index > 0 }));
}

/** Return the condition of a breakpoint that is hit on some ranks alone, before and after the join. */
export function onRanks(ranks: readonly number[], condition = ''): string {
    const own =
        '(lambda d: d.get_rank() if d.is_available() and d.is_initialized() else ' +
        'int(__import__("os").environ.get("RANK", -1)))(__import__("torch.distributed").distributed)';
    const list = ranks.length === 1 ? `== ${ranks[0]}` : `in (${ranks.join(', ')})`;
    return condition ? `${own} ${list} and (${condition})` : `${own} ${list}`;
}

/** Return the ranks in `0, 2-3`. Undefined if the text is something else. */
export function parseRanks(text: string): number[] | undefined {
    const found: number[] = [];
    for (const part of text.split(',')) {
        const match = /^\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?$/.exec(part);
        if (!match) {
            return undefined;
        }
        for (let rank = Number(match[1]); rank <= Number(match[2] ?? match[1]); rank++) {
            found.push(rank);
        }
    }
    return found.length ? found : undefined;
}

export interface Launch {
    program: string;
    args?: string[];
    ranks?: number;
    launcher?: string[];
}

/** Return the arguments of `ddpdoctor` that start a job which waits for the debugger at a port. */
export function runWords(launch: Launch, port: number): string[] {
    const { program, args = [], launcher = [], ranks } = launch;
    const counted = launcher.some((word) => /^--nproc[-_]per[-_]node\b/.test(word));
    return [
        ...['run', '--wait-for-attach', '--stop-with-debugger', '--no-vscode'],
        // The port for all ranks is the one before the first rank's.
        ...['--debug-port', String(port + 1)],
        ...(counted ? [] : ['--nproc-per-node', String(ranks ?? 2)]),
        ...launcher,
        ...[program, ...args],
    ];
}
