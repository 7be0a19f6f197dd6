/** The view of expressions and their values on all ranks that have stopped. */

import * as vscode from 'vscode';
import { Group, grouped, named } from './model';
import { Sessions } from './sessions';

type Node = { expression: string; groups: Group[] } | { group: Group };

export class Expressions implements vscode.TreeDataProvider<Node> {
    private readonly changed = new vscode.EventEmitter<void>();
    readonly onDidChangeTreeData = this.changed.event;
    private nodes: { expression: string; groups: Group[] }[] = [];
    private asked = 0;

    constructor(private readonly sessions: Sessions) {}

    async add(expression: string): Promise<void> {
        this.nodes.push({ expression, groups: [] });
        await this.refresh();
    }

    remove(node: Node): void {
        this.nodes = this.nodes.filter((each) => each !== node);
        this.changed.fire();
    }

    /** Evaluate all expressions again. */
    async refresh(): Promise<void> {
        const asked = ++this.asked;
        for (const node of this.nodes) {
            const groups = grouped(await this.sessions.evaluate(node.expression));
            if (asked !== this.asked) {
                return;
            }
            node.groups = groups;
        }
        this.changed.fire();
    }

    getChildren(node?: Node): Node[] {
        if (!node) {
            return this.nodes;
        }
        return 'groups' in node && node.groups.length > 1 ? node.groups.map((group) => ({ group })) : [];
    }

    getTreeItem(node: Node): vscode.TreeItem {
        if ('group' in node) {
            const { ranks, value, odd } = node.group;
            const item = new vscode.TreeItem(named(ranks));
            item.description = value;
            item.tooltip = value;
            if (odd) {
                item.iconPath = new vscode.ThemeIcon('diff', new vscode.ThemeColor('problemsWarningIcon.foreground'));
            }
            return item;
        }
        const { expression, groups } = node;
        const differs = groups.length > 1;
        const item = new vscode.TreeItem(
            expression,
            differs ? vscode.TreeItemCollapsibleState.Expanded : vscode.TreeItemCollapsibleState.None,
        );
        const [same] = groups;
        item.description = differs ? `${groups.length} different values` : same ? `${same.value} (${named(same.ranks)})` : 'no rank has stopped';
        item.iconPath = new vscode.ThemeIcon(differs ? 'warning' : 'symbol-variable');
        item.contextValue = 'expression';
        return item;
    }
}
