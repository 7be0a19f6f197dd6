/** ddpdoctor in VS Code. It shows what the `ddpdoctor` of the chosen interpreter says. */

import * as vscode from 'vscode';
import { Watch, explain, interpreter } from './cli';
import { Configurations, stale } from './configurations';
import { Expressions } from './expressions';
import { onRanks, parseRanks } from './model';
import { Runs } from './runs';
import { Sessions } from './sessions';

export function activate(context: vscode.ExtensionContext): void {
    const log = vscode.window.createOutputChannel('ddpdoctor');
    let watches: Watch[] = [];
    const runs = new Runs(() => watches);
    const sessions = new Sessions();
    const expressions = new Expressions(sessions);
    const configurations = new Configurations(() => watches);

    const follow = (): void => {
        watches.forEach((watch) => watch.dispose());
        watches = (vscode.workspace.workspaceFolders ?? []).map((folder) => new Watch(folder, log));
        for (const watch of watches) {
            watch.onChange(() => runs.refresh());
            void watch.start();
        }
    };
    follow();

    const start = (configuration: vscode.DebugConfiguration): Thenable<boolean> => {
        const editor = vscode.window.activeTextEditor;
        const folder = editor && vscode.workspace.getWorkspaceFolder(editor.document.uri);
        return vscode.debug.startDebugging(folder ?? vscode.workspace.workspaceFolders?.[0], configuration);
    };
    const [launch, attach] = configurations.provideDebugConfigurations();
    const command = (name: string, run: (...given: never[]) => unknown): vscode.Disposable =>
        vscode.commands.registerCommand(`ddpdoctor.${name}`, run);

    context.subscriptions.push(
        log,
        runs,
        { dispose: () => watches.forEach((watch) => watch.dispose()) },
        vscode.workspace.onDidChangeWorkspaceFolders(follow),
        vscode.workspace.onDidChangeConfiguration((event) => {
            if (event.affectsConfiguration('ddpdoctor.interpreter') || event.affectsConfiguration('python')) {
                follow();
            }
        }),
        // The code of a diagnostic opens a document. VS Code would not run a command from it.
        vscode.workspace.registerTextDocumentContentProvider('ddpdoctor', {
            provideTextDocumentContent: (uri) => explain(uri.path),
        }),
        vscode.window.registerTreeDataProvider('ddpdoctor.runs', runs),
        vscode.window.registerTreeDataProvider('ddpdoctor.expressions', expressions),
        sessions.onChange(() => void expressions.refresh()),
        vscode.debug.registerDebugAdapterTrackerFactory('debugpy', sessions),
        vscode.debug.registerDebugConfigurationProvider('debugpy', stale),
        vscode.debug.registerDebugConfigurationProvider('ddpdoctor', configurations),
        vscode.debug.registerDebugConfigurationProvider(
            'ddpdoctor',
            configurations,
            vscode.DebugConfigurationProviderTriggerKind.Dynamic,
        ),
        command('run', () => start(launch!)),
        command('attach', () => start(attach!)),
        command('continueAll', () => sessions.resume('continue')),
        command('stepAll', () => sessions.resume('next')),
        command('stepIntoAll', () => sessions.resume('stepIn')),
        command('pauseAll', () => sessions.pause()),
        command('breakOnRank', breakOnRank),
        command('evaluate', async () => {
            const prompt = 'An expression, evaluated on each rank that has stopped';
            const editor = vscode.window.activeTextEditor;
            const value = editor?.document.getText(editor.selection) ?? '';
            const expression = await vscode.window.showInputBox({ prompt, value });
            if (expression) {
                await expressions.add(expression);
                await vscode.commands.executeCommand('ddpdoctor.expressions.focus');
            }
        }),
        command('removeExpression', (node: Parameters<Expressions['remove']>[0]) => expressions.remove(node)),
        // VS Code reports another exit status than 0, which a warning has, as a task that failed.
        command('report', () =>
            terminal(['report', 'latest', '--workspace', watches[0]?.folder.uri.fsPath ?? '.', '--exit-zero']),
        ),
    );
}

/** Set a breakpoint at the cursor, or at the line of the menu, that is hit on some ranks alone. */
async function breakOnRank(given?: { uri?: vscode.Uri; lineNumber?: number }): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const uri = given?.uri ?? editor?.document.uri;
    const line = given?.lineNumber === undefined ? editor?.selection.active.line : given.lineNumber - 1;
    if (!uri || line === undefined) {
        return;
    }
    const prompt = 'Break only on these ranks, such as 1 or 0,2-3';
    const text = await vscode.window.showInputBox({
        prompt,
        validateInput: (typed) => (parseRanks(typed) ? undefined : prompt),
    });
    const ranks = text === undefined ? undefined : parseRanks(text);
    if (!ranks) {
        return;
    }
    const location = new vscode.Location(uri, new vscode.Position(line, 0));
    const there = vscode.debug.breakpoints.filter(
        (each) =>
            each instanceof vscode.SourceBreakpoint &&
            each.location.uri.toString() === uri.toString() &&
            each.location.range.start.line === line,
    );
    vscode.debug.removeBreakpoints(there);
    vscode.debug.addBreakpoints([new vscode.SourceBreakpoint(location, true, onRanks(ranks))]);
}

/** Run a command of ddpdoctor in a terminal. */
async function terminal(words: string[]): Promise<void> {
    const folder = vscode.workspace.workspaceFolders?.[0];
    const task = new vscode.Task(
        { type: 'ddpdoctor' },
        folder ?? vscode.TaskScope.Workspace,
        words[0]!,
        'ddpdoctor',
        new vscode.ProcessExecution(await interpreter(folder), ['-m', 'ddpdoctor', ...words]),
    );
    await vscode.tasks.executeTask(task);
}

export function deactivate(): void {
    // Disposables do it.
}
