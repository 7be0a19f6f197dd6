/** Debug configurations of the type `ddpdoctor`: F5 without launch.json and tasks.json. */

import * as net from 'node:net';
import * as vscode from 'vscode';
import { Watch, interpreter } from './cli';
import { Launch, runWords } from './model';

const START_TIMEOUT = 120_000; // Milliseconds for `ddpdoctor run` to open its ports

export class Configurations implements vscode.DebugConfigurationProvider {
    constructor(private readonly watches: () => readonly Watch[]) {}

    provideDebugConfigurations(): vscode.DebugConfiguration[] {
        return [
            { type: 'ddpdoctor', request: 'launch', name: 'ddpdoctor: run the open file', program: '${file}' },
            { type: 'ddpdoctor', request: 'attach', name: 'ddpdoctor: attach to all ranks' },
        ];
    }

    resolveDebugConfiguration(
        _folder: vscode.WorkspaceFolder | undefined,
        given: vscode.DebugConfiguration,
    ): vscode.DebugConfiguration {
        // F5 in a folder without launch.json asks with an empty configuration.
        return given.type ? given : { type: 'ddpdoctor', request: 'launch', name: 'ddpdoctor', program: '${file}' };
    }

    async resolveDebugConfigurationWithSubstitutedVariables(
        folder: vscode.WorkspaceFolder | undefined,
        given: vscode.DebugConfiguration,
        token?: vscode.CancellationToken,
    ): Promise<vscode.DebugConfiguration | undefined> {
        if (given.type !== 'ddpdoctor') {
            return given; // Both registrations of this provider are asked.
        }
        const port = given.request === 'launch' ? await this.launch(folder, given, token) : this.port(folder, given);
        if (port === undefined) {
            return undefined;
        }
        const root = folder?.uri.fsPath;
        return {
            type: 'debugpy',
            request: 'attach',
            name: given.name,
            connect: { host: '127.0.0.1', port },
            justMyCode: given['justMyCode'] ?? true,
            ...(given.request === 'attach' && given['ranks'] ? { ranks: given['ranks'] } : {}),
            ...(root ? { workspaceFolder: root } : {}),
        };
    }

    private port(folder: vscode.WorkspaceFolder | undefined, given: vscode.DebugConfiguration): number | undefined {
        const watches = this.watches().filter((watch) => !folder || watch.folder.uri.fsPath === folder.uri.fsPath);
        const live = watches.find((watch) => watch.snapshot?.live)?.snapshot;
        const port = (given['port'] as number | undefined) ?? live?.debug_port;
        if (port === undefined) {
            void vscode.window.showInformationMessage(
                live ? 'ddpdoctor: the run was started with --no-debug.' : 'ddpdoctor: no run of this folder is live. Start one with `ddpdoctor run`, or press F5.',
            );
        }
        return port;
    }

    /** Start the job in a terminal, held before its first line. Return the port for all ranks. */
    private async launch(
        folder: vscode.WorkspaceFolder | undefined,
        given: vscode.DebugConfiguration,
        token?: vscode.CancellationToken,
    ): Promise<number | undefined> {
        const ranks = vscode.workspace.getConfiguration('ddpdoctor', folder).get<number>('ranks') ?? 2;
        const launch: Launch = { ranks, ...(given as unknown as Launch) };
        const port = await freePorts(1 + (launch.ranks ?? ranks));
        const words = runWords(launch, port);
        const process = new vscode.ProcessExecution(await interpreter(folder), ['-m', 'ddpdoctor', ...words], {
            ...(given['cwd'] ?? folder?.uri.fsPath ? { cwd: (given['cwd'] as string | undefined) ?? folder!.uri.fsPath } : {}),
            env: (given['env'] as Record<string, string> | undefined) ?? {},
        });
        const task = new vscode.Task(
            { type: 'ddpdoctor' },
            folder ?? vscode.TaskScope.Workspace,
            given.name.replace(/^ddpdoctor: /, ''),
            'ddpdoctor',
            process,
        );
        task.presentationOptions = { reveal: vscode.TaskRevealKind.Always, panel: vscode.TaskPanelKind.Dedicated, clear: true };
        const execution = await vscode.tasks.executeTask(task);
        let ended = false;
        const watch = vscode.tasks.onDidEndTaskProcess((event) => {
            ended ||= event.execution === execution;
        });
        try {
            const began = Date.now();
            while (!ended && !token?.isCancellationRequested && Date.now() - began < START_TIMEOUT) {
                if (await listens(port)) {
                    return port;
                }
                await new Promise((resolve) => setTimeout(resolve, 100));
            }
            if (!ended) {
                execution.terminate();
            }
            return undefined; // The terminal says why.
        } finally {
            watch.dispose();
        }
    }
}

/** Says in words that the job of an entry in launch.json is over, which the Python Debugger shows as ECONNREFUSED. */
export const stale: vscode.DebugConfigurationProvider = {
    async resolveDebugConfigurationWithSubstitutedVariables(_folder, given) {
        const { host, port } = (given['connect'] ?? {}) as { host?: string; port?: number };
        // A task before the session starts the job.
        const waits = !/^ddpdoctor: |\(ddpdoctor[,)]/.test(given.name) || given['preLaunchTask'] !== undefined;
        if (waits || host !== '127.0.0.1' || port === undefined || (await listens(port))) {
            return given;
        }
        void vscode.window.showWarningMessage(
            `ddpdoctor: no job has port ${port} now. The one that “${given.name}” of launch.json attached to has ended. ` +
                'Start one with `ddpdoctor run`, or press F5 on the script.',
        );
        return undefined;
    },
};

/** Return the first of some ports in a row that are free, below those that the kernel gives out. */
async function freePorts(count: number): Promise<number> {
    for (let tries = 0; tries < 50; tries++) {
        const first = 20_000 + Math.floor(Math.random() * 10_000);
        const free = await Promise.all(Array.from({ length: count }, (_, index) => isFree(first + index)));
        if (free.every(Boolean)) {
            return first;
        }
    }
    throw new Error(`ddpdoctor: no ${count} free ports in a row`);
}

async function isFree(port: number): Promise<boolean> {
    return new Promise((resolve) => {
        const server = net.createServer();
        server.on('error', () => resolve(false));
        server.listen(port, '127.0.0.1', () => server.close(() => resolve(true)));
    });
}

async function listens(port: number): Promise<boolean> {
    return new Promise((resolve) => {
        const socket = net.connect(port, '127.0.0.1', () => {
            socket.destroy();
            resolve(true);
        });
        socket.on('error', () => resolve(false));
    });
}
