/** Run the `ddpdoctor` of the chosen interpreter. */

import { ChildProcess, execFile, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import * as vscode from 'vscode';
import { Snapshot, latest, parse } from './model';

const RETRY = 5000; // Milliseconds before `top` is started again

/** Return the Python that has ddpdoctor. */
export async function interpreter(folder?: vscode.WorkspaceFolder): Promise<string> {
    const own = vscode.workspace.getConfiguration('ddpdoctor', folder).get<string>('interpreter');
    if (own) {
        return own;
    }
    const python = vscode.extensions.getExtension('ms-python.python');
    const api = (await python?.activate()) as
        | { environments?: { getActiveEnvironmentPath(resource?: vscode.Uri): { path: string } } }
        | undefined;
    return api?.environments?.getActiveEnvironmentPath(folder?.uri).path ?? 'python3';
}

/** Return the page of a finding's code. */
export async function explain(code: string): Promise<string> {
    const python = await interpreter(vscode.workspace.workspaceFolders?.[0]);
    return new Promise((resolve) => {
        execFile(python, ['-m', 'ddpdoctor', 'explain', code], (error, page, said) => resolve(page || said || String(error)));
    });
}

/** Follows the newest run of a folder by `ddpdoctor top --json --watch`. */
export class Watch implements vscode.Disposable {
    private readonly changed = new vscode.EventEmitter<Snapshot | undefined>();
    readonly onChange = this.changed.event;
    snapshot: Snapshot | undefined;
    private process: ChildProcess | undefined;
    private timer: NodeJS.Timeout | undefined;
    private over = false;

    constructor(
        readonly folder: vscode.WorkspaceFolder,
        private readonly log: vscode.OutputChannel,
    ) {}

    async start(): Promise<void> {
        if (this.over || this.process) {
            return;
        }
        const words = ['top', '--json', '--watch', '--workspace', this.folder.uri.fsPath];
        const python = await interpreter(this.folder);
        const top = spawn(python, ['-m', 'ddpdoctor', ...words], {
            cwd: this.folder.uri.fsPath,
            stdio: ['ignore', 'pipe', 'pipe'],
        });
        this.process = top;
        createInterface({ input: top.stdout }).on('line', (line) => this.take(parse(line)));
        createInterface({ input: top.stderr }).on('line', (line) => this.log.appendLine(line));
        top.on('error', (error) => this.log.appendLine(`${python}: ${error.message}`));
        top.on('close', () => {
            this.process = undefined;
            this.timer = setTimeout(() => void this.start(), RETRY);
        });
    }

    private take(snapshot: Snapshot | undefined): void {
        if (snapshot) {
            this.snapshot = latest(this.snapshot, snapshot);
            this.changed.fire(this.snapshot);
        }
    }

    dispose(): void {
        this.over = true;
        clearTimeout(this.timer);
        this.process?.kill();
        this.changed.dispose();
    }
}
