// Drives a real VS Code (code-server) with the extension, and prints what it shows as JSON.
//
//   node end_to_end.mjs HOME WORKSPACE PYTHON LINE
//
// HOME has node_modules/code-server, node_modules/playwright-core and extensions/, in which the
// Python Debugger and this extension are installed. WORKSPACE has train.py and no .vscode.
import { spawn } from 'node:child_process';
import fs from 'node:fs';
import { createRequire } from 'node:module';
import net from 'node:net';
import os from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

const [home, workspace, python, line] = process.argv.slice(2);
const { chromium } = createRequire(path.join(home, 'package.json'))('playwright-core');
const LIMIT = 240_000;

const seen = {};
const data = fs.mkdtempSync(path.join(os.tmpdir(), 'vscode-'));
fs.mkdirSync(`${data}/User`);
fs.writeFileSync(
    `${data}/User/settings.json`,
    JSON.stringify({
        'security.workspace.trust.enabled': false,
        'workbench.startupEditor': 'none',
        'chat.disableAIFeatures': true,
        'ddpdoctor.interpreter': python,
        'python.defaultInterpreterPath': python,
    }),
);
const port = await new Promise((resolve) => {
    const server = net.createServer().listen(0, '127.0.0.1', () => {
        const { port } = server.address();
        server.close(() => resolve(port));
    });
});
const server = spawn(
    process.execPath,
    [
        path.join(home, 'node_modules/code-server/out/node/entry.js'),
        ...['--auth', 'none', '--bind-addr', `127.0.0.1:${port}`, '--user-data-dir', data],
        ...['--extensions-dir', path.join(home, 'extensions'), '--disable-telemetry'],
        ...['--disable-update-check', '--disable-workspace-trust', workspace],
    ],
    { stdio: 'ignore' },
);
const until = async (condition) => {
    for (const began = Date.now(); Date.now() - began < LIMIT; await sleep(100)) {
        if (await condition()) {
            return Date.now() - began;
        }
    }
    return null;
};
const answers = () =>
    new Promise((resolve) => {
        const socket = net.connect(port, '127.0.0.1', () => resolve(!socket.destroy().connecting));
        socket.on('error', () => resolve(false));
    });
let browser;
try {
    await until(answers);
    browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox'] });
    const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
    page.setDefaultTimeout(LIMIT);
    await page.goto(`http://127.0.0.1:${port}/?folder=${workspace}`, { timeout: LIMIT, waitUntil: 'domcontentloaded' });
    await page.waitForSelector('.explorer-folders-view .monaco-list-row');
    const box = page.locator('.quick-input-widget input.input:visible').first();
    const quick = async (text) => {
        // A stop of the debugger takes the focus, which closes the box.
        await until(async () => {
            try {
                await page.keyboard.press('Control+p');
                await box.fill(text, { timeout: 4000 });
                await page.locator('.quick-input-list .monaco-list-row').first().waitFor({ timeout: 8000 });
                await sleep(500);
                await box.press('Enter', { timeout: 4000 });
                return true;
            } catch {
                await page.keyboard.press('Escape');
                return false;
            }
        });
    };
    const ask = async (expression) => {
        const prompt = page.locator('.quick-input-widget', { hasText: 'evaluated on each rank' });
        await until(async () => {
            await quick('>ddpdoctor: Evaluate on All Ranks');
            return prompt.waitFor({ timeout: 8000 }).then(() => true, () => false);
        });
        await box.fill(expression);
        await page.keyboard.press('Enter');
    };
    const rows = (view) => page.$$eval(`${view} .monaco-list-row`, (all) => all.map((row) => row.innerText.replace(/\s*\n\s*/g, ' ')));
    const callStack = () => rows('.debug-call-stack');
    const paused = async () => (await callStack()).filter((row) => /^rank \d+ (?!Running)/.test(row)).length >= 2;
    const expressions = () => rows('[aria-label="Expressions on All Ranks Section"] ~ .pane-body, .pane-body');

    await quick(`train.py:${line}`);
    await page.locator('.monaco-editor .view-line').first().waitFor();
    const dot = page.locator('.codicon-debug-breakpoint');
    await until(async () => {
        await page.keyboard.press('F9');
        await sleep(1000);
        return (await dot.count()) > 0;
    });
    await page.keyboard.press('F5');
    await page.locator('.quick-input-list .monaco-list-row', { hasText: 'ddpdoctor: all ranks' }).first().click();
    seen.first_stop = await until(paused);
    seen.call_stack = await callStack();
    await ask('dist.get_world_size()');
    await ask('rank');
    await until(async () => (await expressions()).some((row) => row.startsWith('rank 1')));
    seen.expressions = (await expressions()).filter((row) => /dist|^rank/.test(row));
    await quick('>ddpdoctor: Focus on Runs View');
    await until(async () => (await rows('.pane-body')).some((row) => /rank 1 .*step/.test(row)));
    seen.runs = await rows('.pane-body');
    seen.status = (await page.$$eval('.statusbar-item', (all) => all.map((item) => item.innerText.trim()))).filter((text) => text.includes('ddpdoctor'));
    await quick('>View: Show Run and Debug');
    await quick('>ddpdoctor: Step Over on All Ranks');
    seen.stepped = await until(paused);
    await page.keyboard.press('Shift+F5');
    seen.stop = await until(async () => (await callStack()).length === 0);
} catch (error) {
    seen.error = String(error);
} finally {
    if (process.env.SCREENSHOT && browser) {
        await browser.contexts()[0].pages()[0].screenshot({ path: process.env.SCREENSHOT });
    }
    await browser?.close();
    server.kill();
    console.log(JSON.stringify(seen));
    setTimeout(() => process.exit(0), 2000);
}
