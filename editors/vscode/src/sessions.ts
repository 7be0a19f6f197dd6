/** The debug sessions of the ranks: what is done to all of them at once. */

import * as vscode from 'vscode';
import { Answer, Message, follow, mainThread } from './model';

interface Session {
    session: vscode.DebugSession;
    rank: number;
    /** The threads that have stopped. */
    stopped: Set<number>;
}

/** Follows the sessions of ranks by the messages of the debugger. */
export class Sessions implements vscode.DebugAdapterTrackerFactory {
    private readonly all = new Map<string, Session>();
    private readonly changed = new vscode.EventEmitter<void>();
    /** A rank has stopped or goes on. */
    readonly onChange = this.changed.event;

    createDebugAdapterTracker(session: vscode.DebugSession): vscode.DebugAdapterTracker | undefined {
        const rank = /^rank (\d+)/.exec(session.name)?.[1] ?? /^ddpdoctor: rank (\d+)/.exec(session.name)?.[1];
        if (rank === undefined) {
            return undefined;
        }
        const own: Session = { session, rank: Number(rank), stopped: new Set() };
        const forget = (): void => {
            this.all.delete(session.id);
            this.changed.fire();
        };
        const take = (message: Message): void => {
            if (follow(own.stopped, message)) {
                this.changed.fire();
            }
        };
        this.all.set(session.id, own);
        return {
            onWillReceiveMessage: take,
            onDidSendMessage: take,
            onWillStopSession: forget,
            onExit: forget,
        };
    }

    get ranks(): number[] {
        return [...this.all.values()].map(({ rank }) => rank);
    }

    /** Send a request to each rank's first stopped thread. */
    async resume(command: 'continue' | 'next' | 'stepIn'): Promise<void> {
        await this.each(async ({ session, stopped }) => {
            const thread = stopped.values().next().value;
            if (thread !== undefined) {
                await session.customRequest(command, { threadId: thread });
            }
        });
    }

    /** Pause the main thread of each rank that runs. */
    async pause(): Promise<void> {
        await this.each(async ({ session, stopped }) => {
            if (stopped.size === 0) {
                const { threads } = (await session.customRequest('threads')) as { threads: { id: number; name: string }[] };
                await session.customRequest('pause', { threadId: mainThread(threads) });
            }
        });
    }

    /** Return the value of an expression on each rank that has stopped. */
    async evaluate(expression: string): Promise<Answer[]> {
        const answers: Answer[] = [];
        await this.each(async ({ session, rank, stopped }) => {
            const thread = stopped.values().next().value;
            if (thread === undefined) {
                return;
            }
            answers.push({ rank, value: await value(session, thread, expression) });
        });
        return answers;
    }

    private async each(act: (session: Session) => Promise<void>): Promise<void> {
        const done = await Promise.allSettled([...this.all.values()].map(act));
        const failed = done.find((each) => each.status === 'rejected');
        if (failed) {
            void vscode.window.showWarningMessage(`ddpdoctor: ${reason((failed as PromiseRejectedResult).reason)}`);
        }
    }
}

async function value(session: vscode.DebugSession, thread: number, expression: string): Promise<string> {
    try {
        const stack = (await session.customRequest('stackTrace', { threadId: thread, startFrame: 0, levels: 1 })) as {
            stackFrames: { id: number }[];
        };
        const frameId = stack.stackFrames[0]?.id;
        const answer = (await session.customRequest('evaluate', { expression, frameId, context: 'watch' })) as {
            result: string;
        };
        return answer.result;
    } catch (error) {
        return reason(error).trim().split('\n').at(-1) ?? '';
    }
}

function reason(error: unknown): string {
    return error instanceof Error ? error.message : String(error);
}
