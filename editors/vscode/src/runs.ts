/** The view of the folder's run and its ranks, its findings in Problems, and the status bar. */

import * as path from 'node:path';
import * as vscode from 'vscode';
import { Watch } from './cli';
import { Finding, Level, Rank, Snapshot, codeLength, doing, explained, named, place, status } from './model';

type Node = { run: Snapshot; folder: vscode.Uri } | { rank: Rank; folder: vscode.Uri } | { finding: Finding; folder: vscode.Uri };

const ICONS: Record<string, string> = {
    running: 'play-circle',
    debugger: 'debug-alt',
    ended: 'pass',
    dead: 'error',
    stale: 'warning',
    starting: 'loading~spin',
};
const SEVERITIES = {
    error: vscode.DiagnosticSeverity.Error,
    warning: vscode.DiagnosticSeverity.Warning,
    info: vscode.DiagnosticSeverity.Information,
};
const COLOURS: Partial<Record<Level, string>> = { error: 'error', warning: 'warning' };

export class Runs implements vscode.TreeDataProvider<Node>, vscode.Disposable {
    private readonly changed = new vscode.EventEmitter<void>();
    readonly onDidChangeTreeData = this.changed.event;
    private readonly problems = vscode.languages.createDiagnosticCollection('ddpdoctor');
    private readonly bar = vscode.window.createStatusBarItem('ddpdoctor', vscode.StatusBarAlignment.Left);
    private shown = '';

    constructor(private readonly watches: () => readonly Watch[]) {
        this.bar.name = 'ddpdoctor';
        this.bar.command = 'ddpdoctor.runs.focus';
    }

    /** Show what has changed. */
    refresh(): void {
        this.changed.fire();
        const seen = this.watches().flatMap(({ snapshot, folder }) => (snapshot?.run ? [{ snapshot, folder }] : []));
        const newest = seen.find(({ snapshot }) => snapshot.live) ?? seen[0];
        const said = status(newest?.snapshot);
        if (said) {
            const colour = COLOURS[said.level];
            this.bar.text = said.text;
            this.bar.tooltip = newest?.snapshot.verdict.text;
            this.bar.backgroundColor = colour ? new vscode.ThemeColor(`statusBarItem.${colour}Background`) : undefined;
            this.bar.show();
        } else {
            this.bar.hide();
        }
        const found = JSON.stringify(seen.map(({ snapshot }) => snapshot.findings));
        if (found !== this.shown) {
            this.shown = found;
            this.problems.clear();
            for (const { snapshot, folder } of seen) {
                this.report(snapshot.findings, folder.uri);
            }
        }
    }

    private report(findings: readonly Finding[], folder: vscode.Uri): void {
        const files = new Map<string, vscode.Diagnostic[]>();
        for (const finding of findings.filter((each) => each.location)) {
            const { path: file, line } = finding.location!;
            const uri = vscode.Uri.file(path.resolve(folder.fsPath, file));
            const range = statement(uri, line);
            const diagnostic = new vscode.Diagnostic(range, explained(finding), SEVERITIES[finding.severity]);
            diagnostic.source = 'ddpdoctor';
            diagnostic.code = { value: finding.code, target: vscode.Uri.from({ scheme: 'ddpdoctor', path: finding.code }) };
            const places = finding.evidence.flatMap((text) => {
                const site = place(/(\S+\.py:\d+)/.exec(text)?.[1]);
                return site ? [{ text, site }] : [];
            });
            diagnostic.relatedInformation = places.map(({ text, site }) => {
                const at = new vscode.Position(Math.max(0, site.line - 1), 0);
                const where = vscode.Uri.file(path.resolve(folder.fsPath, site.path));
                return new vscode.DiagnosticRelatedInformation(new vscode.Location(where, at), text);
            });
            files.set(uri.fsPath, [...(files.get(uri.fsPath) ?? []), diagnostic]);
        }
        for (const [file, diagnostics] of files) {
            this.problems.set(vscode.Uri.file(file), diagnostics);
        }
    }

    getChildren(node?: Node): Node[] {
        if (!node) {
            return this.watches().flatMap(({ snapshot, folder }) =>
                snapshot?.run ? [{ run: snapshot, folder: folder.uri }] : [],
            );
        }
        if (!('run' in node)) {
            return [];
        }
        const { folder } = node;
        const ranks = [...node.run.ranks].sort((a, b) => a.rank - b.rank);
        return [
            ...node.run.findings.map((finding) => ({ finding, folder })),
            ...ranks.map((rank) => ({ rank, folder })),
        ];
    }

    getTreeItem(node: Node): vscode.TreeItem {
        if ('run' in node) {
            const { run } = node;
            const item = new vscode.TreeItem(run.job.script ?? run.run ?? '', vscode.TreeItemCollapsibleState.Expanded);
            item.id = run.run ?? '';
            item.description = [run.state, run.job.step === undefined ? '' : `step ${run.job.step}`].filter(Boolean).join(' · ');
            item.tooltip = run.verdict.text;
            item.iconPath = new vscode.ThemeIcon(run.live ? 'pulse' : 'history');
            return item;
        }
        const item = new vscode.TreeItem('');
        const at = 'rank' in node ? place(node.rank.site) : node.finding.location;
        if ('rank' in node) {
            const { rank } = node;
            item.label = `rank ${rank.rank}`;
            item.description = doing(rank);
            item.tooltip = rank.said ?? item.description;
            item.iconPath = new vscode.ThemeIcon(ICONS[rank.state ?? ''] ?? 'circle-outline');
            item.contextValue = 'rank';
        } else {
            const { finding } = node;
            item.label = finding.code;
            item.description = `${finding.ranks.length ? `${named(finding.ranks)}: ` : ''}${finding.message}`;
            item.tooltip = explained(finding);
            item.iconPath = new vscode.ThemeIcon(finding.severity, new vscode.ThemeColor(`problems${finding.severity === 'info' ? 'Info' : finding.severity === 'error' ? 'Error' : 'Warning'}Icon.foreground`));
        }
        if (at) {
            const line = Math.max(0, at.line - 1);
            const file = vscode.Uri.file(path.resolve(node.folder.fsPath, at.path));
            item.command = {
                title: 'Open',
                command: 'vscode.open',
                arguments: [file, { selection: new vscode.Range(line, 0, line, 0) }],
            };
        }
        return item;
    }

    dispose(): void {
        this.changed.dispose();
        this.problems.dispose();
        this.bar.dispose();
    }
}

/** Return the range of the code on a line, if the file is open, else of the whole line. */
function statement(uri: vscode.Uri, line: number): vscode.Range {
    const at = Math.max(0, line - 1);
    const open = vscode.workspace.textDocuments.find((document) => document.uri.fsPath === uri.fsPath);
    if (!open || at >= open.lineCount) {
        return new vscode.Range(at, 0, at, 1000);
    }
    const { text, firstNonWhitespaceCharacterIndex: first } = open.lineAt(at);
    return new vscode.Range(at, first, at, codeLength(text));
}
