// Drives a real VS Code (code-server) with the extension, and prints what it shows as JSON.
//
//   node end_to_end.mjs HOME WORKSPACE PYTHON [TRIAL...]
//
// HOME has node_modules/code-server, node_modules/playwright-core and extensions/, in which Python, the
// Python Debugger and this extension are installed. WORKSPACE is an empty folder. Times are in
// milliseconds. SCREENSHOTS names a folder for a picture of the end of each trial.
import { spawn, spawnSync } from 'node:child_process';
import fs from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';
import net from 'node:net';
import os from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

const [home, workspace, python, ...chosen] = process.argv.slice(2);
const { chromium } = createRequire(path.join(home, 'package.json'))('playwright-core');
const LIMIT = 1000 * Number(process.env.LIMIT ?? 240); // For a whole trial's slowest wait
const data = fs.mkdtempSync(path.join(os.tmpdir(), 'vscode-'));
const children = [];
let page;

// The editor

function configure(settings = {}) {
    const base = {
        'security.workspace.trust.enabled': false,
        'workbench.startupEditor': 'none',
        'chat.disableAIFeatures': true,
        'ddpdoctor.interpreter': python,
        'python.defaultInterpreterPath': python,
        'debug.toolBarLocation': 'docked', // A floating one covers the quick-open box.
        'window.autoDetectColorScheme': false,
    };
    fs.mkdirSync(`${data}/User`, { recursive: true });
    fs.writeFileSync(`${data}/User/settings.json`, JSON.stringify({ ...base, ...settings }));
}

async function open() {
    const port = await new Promise((resolve) => {
        const server = net.createServer().listen(0, '127.0.0.1', () => {
            const { port } = server.address();
            server.close(() => resolve(port));
        });
    });
    const options = ['--auth', 'none', '--bind-addr', `127.0.0.1:${port}`, '--user-data-dir', data];
    options.push('--extensions-dir', path.join(home, 'extensions'), '--disable-telemetry');
    options.push('--disable-update-check', '--disable-workspace-trust', workspace);
    start(process.execPath, [path.join(home, 'node_modules/code-server/out/node/entry.js'), ...options]);
    const answers = () =>
        new Promise((resolve) => {
            http.get(`http://127.0.0.1:${port}/healthz`, (answer) => resolve(Boolean(answer.resume()))).on('error', () =>
                resolve(false),
            );
        });
    await until(answers);
    const executablePath = process.env.CHROMIUM ?? '/usr/bin/chromium';
    const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
    page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
    page.setDefaultTimeout(LIMIT);
    await page.goto(`http://127.0.0.1:${port}/?folder=${workspace}`, { timeout: LIMIT, waitUntil: 'domcontentloaded' });
    await page.waitForSelector('.explorer-folders-view .monaco-list-row');
    return browser;
}

/** Start a process that ends with this one. */
function start(command, words, options = {}) {
    const child = spawn(command, words, { stdio: 'ignore', detached: true, ...options });
    children.push(child);
    return child;
}

/** Wait for a condition. Return the milliseconds, null if it did not come. */
async function until(condition, limit = LIMIT) {
    for (const began = Date.now(); Date.now() - began < limit; await sleep(100)) {
        if (await condition()) {
            return Date.now() - began;
        }
    }
    return null;
}

const input = () => page.locator('.quick-input-widget input.input:visible').first();

/** Type into the quick-open box. A stop of the debugger takes the focus, which closes the box. */
async function quick(text) {
    await until(async () => {
        try {
            await page.keyboard.press('Control+p');
            await input().fill(text, { timeout: 4000 });
            await page.locator('.quick-input-list .monaco-list-row').first().waitFor({ timeout: 8000 });
            await sleep(500);
            await input().press('Enter', { timeout: 4000 });
            return true;
        } catch {
            await page.keyboard.press('Escape');
            return false;
        }
    });
}

const command = (title) => quick(`>${title}`);

/** Run a command that asks for a text, and answer it. */
async function answered(title, prompt, text) {
    const asked = page.locator('.quick-input-widget', { hasText: prompt });
    await until(async () => {
        await command(title);
        return asked.waitFor({ timeout: 8000 }).then(() => true, () => false);
    });
    await input().fill(text);
    await input().press('Enter');
    await asked.waitFor({ state: 'hidden' }); // The extension has validated the answer.
}

const texts = (selector) =>
    page.$$eval(selector, (all) => all.map((each) => each.innerText.replace(/\s*\n\s*/g, ' ').trim()));
const rows = (view) => texts(`${view} .monaco-list-row`);
const callStack = () => rows('.debug-call-stack');
const variables = () => rows('.debug-variables');
const panes = () => rows('.pane-body');
const notifications = () => texts('.notification-list-item-message, .monaco-dialog-box');
const statusBar = async () => (await texts('.statusbar-item')).filter((text) => text.includes('ddpdoctor'));

/** Return a condition: the rows of as many ranks match. */
const ranks = (count, pattern) => async () =>
    (await callStack()).filter((row) => /^rank \d/i.test(row) && pattern.test(row)).length >= count;
const stopped = (count) => ranks(count, /^(?!.*\bRunning)/);
const running = (count) => ranks(count, /\bRunning/);

function copy(job) {
    fs.copyFileSync(path.join(import.meta.dirname, 'jobs', job), path.join(workspace, job));
    return 1 + fs.readFileSync(path.join(workspace, job), 'utf8').split('\n').findIndex((line) => line.endsWith('# here'));
}

/** Open a job at its marked line. */
async function show(job) {
    const line = copy(job);
    const tab = page.locator('.tab.active', { hasText: job });
    await until(async () => {
        await quick(`${job}:${line}`); // The first search for a new file may find nothing.
        return tab.waitFor({ timeout: 8000 }).then(() => true, () => page.keyboard.press('Escape').then(() => false));
    });
    await page.locator('.monaco-editor .view-line').first().waitFor();
    await sleep(500);
}

async function breakHere() {
    const dot = page.locator('.monaco-editor .codicon-debug-breakpoint').first();
    await until(async () => {
        if ((await dot.count()) === 0) {
            await page.keyboard.press('F9');
            await dot.waitFor({ timeout: 20_000 }).catch(() => {}); // A second F9 would remove it.
        }
        await sleep(500);
        return (await dot.count()) > 0;
    });
}

/** Press F5 in a folder without launch.json. */
async function f5() {
    await command('View: Show Run and Debug');
    await page.keyboard.press('Control+1'); // The editor has the script to run.
    const entry = page.locator('.quick-input-list .monaco-list-row', { hasText: 'ddpdoctor: all ranks' }).first();
    let began;
    await until(async () => {
        began = Date.now();
        await page.keyboard.press('F5');
        const chosen = () => entry.click({ timeout: 8000 }).then(() => true, () => false);
        return (await chosen()) || jobs().length > 0;
    });
    await until(async () => (await callStack()).length > 0);
    return began;
}

/** Stop the session. Return the milliseconds until nothing of the job is left. */
async function stop() {
    const began = Date.now();
    await page.keyboard.press('Shift+F5');
    await until(async () => (await callStack()).length === 0);
    await until(() => jobs().length === 0, 30_000);
    return jobs().length ? null : Date.now() - began;
}

/** Return the processes whose working directory is the workspace, without terminals and `top`. */
function jobs() {
    return fs.readdirSync('/proc').filter((pid) => {
        try {
            const words = fs.readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
            return fs.readlinkSync(`/proc/${pid}/cwd`) === workspace && words.some((word) => word.endsWith('.py'));
        } catch {
            return false;
        }
    });
}

async function removeBreakpoints() {
    const dots = page.locator('.monaco-editor [class*=codicon-debug-breakpoint]');
    const dialog = page.locator('.monaco-dialog-box');
    await until(async () => {
        if ((await dots.count()) > 0) {
            await command('Debug: Remove All Breakpoints');
            await dialog.waitFor({ timeout: 4000 }).then(() => page.keyboard.press('Enter'), () => {});
            await sleep(1000);
        }
        return (await dots.count()) === 0;
    });
}

// The trials

const TRIALS = {
    /** F5 without any file: both ranks stop; expressions, runs, step over and Stop. */
    async f5() {
        await show('train.py');
        await breakHere();
        const began = await f5();
        const seen = { first_stop: (await until(stopped(2))) === null ? null : Date.now() - began };
        seen.call_stack = await callStack();
        for (const expression of ['dist.get_world_size()', 'rank']) {
            await answered('ddpdoctor: Evaluate on All Ranks', 'evaluated on each rank', expression);
        }
        await until(async () => (await panes()).some((row) => row.startsWith('rank 1')));
        seen.expressions = (await panes()).filter((row) => /dist|^rank/.test(row));
        await command('ddpdoctor: Focus on Runs View');
        await until(async () => (await panes()).some((row) => /rank 1 .*step/.test(row)));
        seen.runs = await panes();
        seen.status = await statusBar();
        await command('View: Show Run and Debug');
        await command('ddpdoctor: Step Over on All Ranks');
        seen.stepped = await until(ranks(2, /: step/i));
        seen.stepped_stack = await callStack();
        await picture('f5-stepped');
        seen.stop = await stop();
        return seen;
    },

    /** F5 with the files that `ddpdoctor vscode` writes: a tensor on each rank, a step, Stop. */
    async files() {
        const words = ['-m', 'ddpdoctor', 'vscode', '--workspace', workspace];
        const seen = { said: spawnSync(python, words, { cwd: workspace, encoding: 'utf8' }).stdout };
        try {
            await show('train.py');
            await removeBreakpoints();
            await breakHere();
            const began = Date.now();
            await quick('debug ddpdoctor: run + attach');
            seen.first_stop = (await until(stopped(2))) === null ? null : Date.now() - began;
            seen.call_stack = await callStack();
            await picture('files-stopped');
            await answered('ddpdoctor: Evaluate on All Ranks', 'evaluated on each rank', 'batch');
            const values = async () => (await panes()).filter((row) => /Tensor|different values/.test(row));
            await until(async () => (await values()).length > 2);
            seen.values = await values();
            await picture('files-values');
            await command('View: Show Run and Debug');
            await page.keyboard.press('F10'); // On the chosen rank alone.
            seen.stepped = await until(ranks(1, /: step/i));
            seen.stop = await stop();
            await sleep(8000); // The report runs after the session.
            seen.notifications = await notifications();
        } finally {
            fs.rmSync(`${workspace}/.vscode`, { recursive: true });
        }
        return seen;
    },

    /** Findings of a job in Problems: the statement is underlined, the hover explains, the code links. */
    async findings() {
        await show('sick.py');
        const began = await f5();
        const problem = page.locator('.markers-panel .monaco-list-row', { hasText: /DDP\d{3}/ });
        await command('Problems: Focus on Problems View');
        const seen = {};
        await until(async () => (await problem.count()) > 0);
        seen.first_problem = Date.now() - began;
        seen.problems = await rows('.markers-panel');
        seen.status = await statusBar();
        const underlined = page.locator('.view-overlays .squiggly-error, .view-overlays .squiggly-warning').first();
        const box = await underlined.boundingBox();
        const { width, height } = box;
        seen.underlined = { width, height };
        await page.mouse.move(box.x + width / 2, box.y + height / 2 - 6, { steps: 5 });
        const hover = page.locator('.monaco-hover .marker').first();
        await hover.waitFor({ timeout: 30_000 });
        seen.hover = await hover.innerText();
        await picture('findings-hover');
        await hover.locator('a', { hasText: /DDP\d{3}/ }).first().click();
        await page.locator('.tab.active', { hasText: /DDP\d{3}/ }).waitFor({ timeout: 30_000 });
        const lines = () => texts('.editor-instance .view-line');
        await until(async () => (await lines()).some((line) => /^DDP\d{3}/.test(line)));
        seen.page = (await lines()).slice(0, 5);
        await picture('findings-page');
        await command('View: Show Run and Debug');
        seen.stop = await stop();
        return seen;
    },

    /** A breakpoint on rank 1 alone, continue all, pause all. */
    async one_rank() {
        await show('train.py');
        await removeBreakpoints();
        await answered('ddpdoctor: Break Only on Rank', 'Break only on these ranks', '1');
        await page.locator('.codicon-debug-breakpoint-conditional').first().waitFor();
        const began = await f5();
        await until(stopped(1));
        const seen = { first_stop: Date.now() - began };
        await sleep(2000);
        seen.call_stack = await callStack();
        await removeBreakpoints();
        await command('ddpdoctor: Continue All Ranks');
        seen.continued = await until(running(2));
        seen.running = await callStack();
        await command('ddpdoctor: Pause All Ranks');
        seen.paused = await until(stopped(2));
        seen.paused_stack = await callStack();
        seen.stop = await stop();
        return seen;
    },

    /** Four ranks by the setting; Restart starts one job anew; Stop leaves no process. */
    async restart() {
        configure({ 'ddpdoctor.ranks': 4 });
        await show('train.py');
        await removeBreakpoints();
        await breakHere();
        const began = await f5();
        await until(stopped(4));
        const seen = { first_stop: Date.now() - began, call_stack: await callStack() };
        const before = jobs();
        const pressed = Date.now();
        await page.keyboard.press('Control+Shift+F5');
        await until(() => jobs().length > 0 && !jobs().some((pid) => before.includes(pid)));
        seen.old_job_gone = Date.now() - pressed;
        await until(stopped(4));
        seen.restarted = Date.now() - pressed;
        seen.restarted_stack = await callStack();
        seen.processes = [before.length, jobs().length];
        seen.notifications = await notifications();
        seen.stop = await stop();
        configure();
        return seen;
    },

    /** An exception that nobody catches, in one rank. */
    async exception() {
        await show('raises.py');
        await removeBreakpoints();
        const began = await f5();
        await until(stopped(1));
        const seen = { first_stop: Date.now() - began };
        await until(async () => (await variables()).some((row) => row.startsWith('batch')), 30_000);
        seen.call_stack = await callStack();
        seen.variables = await variables();
        seen.widget = await texts('.exception-widget');
        seen.hover = await hovered('batch');
        await picture('exception-hover');
        seen.stop = await stop();
        return seen;
    },

    /** Rank 1 is held, rank 0 waits for it in native code: its locals and an evaluation. */
    async waits() {
        await show('waits.py');
        await removeBreakpoints();
        await answered('ddpdoctor: Break Only on Rank', 'Break only on these ranks', '1');
        await page.locator('.codicon-debug-breakpoint-conditional').first().waitFor();
        await f5();
        const seen = { held: await until(stopped(1)) };
        await sleep(2000);
        await command('ddpdoctor: Pause All Ranks');
        seen.paused = await until(stopped(2));
        seen.call_stack = await callStack();
        const row = page.locator('.debug-call-stack .monaco-list-row', { hasText: 'rank 0' }).first();
        await row.click({ position: { x: 50, y: 10 } }); // The buttons for its thread appear on the right.
        const waiting = page.locator('.debug-call-stack .monaco-list-row', { hasText: /^\s*reduced/ }).first();
        await waiting.waitFor({ timeout: 30_000 }).then(() => waiting.click(), () => {});
        seen.locals = await until(async () => (await variables()).some((row) => row.startsWith('scale')), 30_000);
        seen.variables = await variables();
        await picture('waits-locals');
        for (const expression of ['step', 'loss.sum()']) {
            await answered('ddpdoctor: Evaluate on All Ranks', 'evaluated on each rank', expression);
        }
        await sleep(3000);
        seen.expressions = (await panes()).filter((row) => /^(step|loss|rank)/.test(row));
        await picture('waits-expressions');
        await command('View: Show Run and Debug');
        await row.hover();
        await row.locator('.codicon-debug-continue').click();
        await page.mouse.move(700, 300); // The buttons hide the state.
        seen.continued = await until(async () => (await callStack()).some((each) => /rank 0.*Running/.test(each)), 30_000);
        await command('ddpdoctor: Pause All Ranks');
        seen.paused_again = await until(stopped(2), 30_000);
        seen.stop = await stop();
        return seen;
    },

    /** A job that runs in a terminal: all ranks stop together, and tensors are summed up. */
    async late() {
        await show('train.py');
        await removeBreakpoints();
        const job = terminal(['run', '--nproc-per-node', '2', 'train.py'], workspace);
        await command('ddpdoctor: Focus on Runs View');
        await until(async () => (await panes()).some((row) => /^rank 1 ?step/.test(row)));
        await show('train.py');
        await breakHere();
        const began = Date.now();
        await command('ddpdoctor: Attach to All Ranks');
        await until(stopped(2));
        const seen = { first_stop: Date.now() - began, call_stack: await callStack() };
        await until(async () => (await variables()).some((row) => row.startsWith('batch')), 30_000);
        seen.batch = (await variables()).filter((row) => row.startsWith('batch'));
        seen.hover = await hovered('batch');
        await picture('late-hover');
        await answered('ddpdoctor: Evaluate on All Ranks', 'evaluated on each rank', '_'); // The step
        const values = async () => (await panes()).filter((row) => /^_.*(ranks 0-1|different values)/.test(row));
        await until(async () => (await values()).length > 0);
        seen.step = await values();
        await command('View: Show Run and Debug');
        await command('ddpdoctor: Step Over on All Ranks');
        seen.stepped = await until(ranks(2, /: step/i));
        seen.stepped_stack = await callStack();
        await page.keyboard.press('Shift+F5');
        await until(async () => (await callStack()).length === 0);
        await sleep(2000);
        seen.goes_on = jobs().length > 0;
        job.kill('SIGINT');
        await until(() => jobs().length === 0);
        return seen;
    },

    /** An old launch.json: its port is another project's, then nobody's. */
    async stale() {
        const other = fs.mkdtempSync(path.join(os.tmpdir(), 'other-'));
        fs.copyFileSync(path.join(import.meta.dirname, 'jobs', 'train.py'), path.join(other, 'train.py'));
        const port = 20_000 + Math.floor(Math.random() * 10_000);
        const job = terminal(['run', '--nproc-per-node', '2', '--debug-port', String(port + 1), 'train.py'], other);
        const name = 'ddpdoctor: attach all ranks';
        const configuration = { name, type: 'debugpy', request: 'attach', connect: { host: '127.0.0.1', port } };
        configuration.workspaceFolder = '${workspaceFolder}';
        fs.mkdirSync(`${workspace}/.vscode`, { recursive: true });
        fs.writeFileSync(`${workspace}/.vscode/launch.json`, JSON.stringify({ version: '0.2.0', configurations: [configuration] }));
        const seen = {};
        try {
            await until(() => listens(port));
            await show('train.py');
            await quick(`debug ${name}`);
            await until(async () => (await notifications()).length > 0, 30_000);
            seen.another_project = await notifications();
            await picture('stale-another');
            await page.keyboard.press('Escape');
            job.kill('SIGINT');
            await until(async () => !(await listens(port)));
            await command('Notifications: Clear All Notifications');
            await quick(`debug ${name}`);
            await until(async () => (await notifications()).length > 0, 30_000);
            seen.nobody = await notifications();
            seen.modal = await texts('.monaco-dialog-box');
            await picture('stale-nobody');
            await page.keyboard.press('Escape');
        } finally {
            fs.rmSync(`${workspace}/.vscode`, { recursive: true });
            fs.rmSync(other, { recursive: true, force: true });
        }
        return seen;
    },

    /** The report of a run with a warning: the task of it has not failed. */
    async report() {
        await show('sick.py');
        const job = terminal(['run', '--nproc-per-node', '2', 'sick.py'], workspace);
        await command('ddpdoctor: Focus on Runs View');
        const live = async () => (await panes()).some((row) => /^sick\.py ?running/.test(row));
        await until(async () => (await live()) && (await panes()).some((row) => /^DDP\d{3}/.test(row)));
        const seen = { runs: await panes() };
        job.kill('SIGINT');
        await until(() => jobs().length === 0);
        await command('ddpdoctor: Show the Report');
        await sleep(8000);
        seen.terminal = await panels();
        seen.runs_after = await panes();
        seen.status = await statusBar();
        seen.failed = await page.locator('.terminal-tabs-entry .codicon-error, .terminal-decoration.codicon-terminal-decoration-error').count();
        seen.notifications = await notifications();
        return seen;
    },
};

/** Return the text of the hover over a word of the open editor, where it stands first. */
async function hovered(word) {
    const token = page.locator('.monaco-editor .view-line span span', { hasText: word }).last();
    await token.hover();
    const hover = page.locator('.debug-hover-widget:visible, .monaco-hover:visible').first();
    await hover.waitFor({ timeout: 15_000 }).catch(() => {});
    await sleep(500);
    return texts('.debug-hover-widget, .monaco-hover');
}

const panels = () => texts('.terminal-tabs-entry, .single-terminal-tab');

function terminal(words, cwd) {
    return start(python, ['-m', 'ddpdoctor', ...words], { cwd });
}

const listens = (port) =>
    new Promise((resolve) => {
        const socket = net.connect(port, '127.0.0.1', () => resolve(Boolean(socket.destroy())));
        socket.on('error', () => resolve(false));
    });

async function picture(name) {
    if (process.env.SCREENSHOTS) {
        await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}.png` });
    }
}

function end() {
    for (const child of children) {
        try {
            process.kill(-child.pid, 'SIGTERM');
        } catch {
            // It has ended.
        }
    }
}

for (const signal of ['SIGINT', 'SIGTERM']) {
    process.on(signal, () => {
        end();
        process.exit(1);
    });
}

const seen = {};
let browser;
try {
    fs.readdirSync(path.join(import.meta.dirname, 'jobs')).forEach(copy); // The search finds files late.
    configure();
    browser = await open();
    for (const name of chosen.length ? chosen : Object.keys(TRIALS)) {
        try {
            seen[name] = await TRIALS[name]();
        } catch (error) {
            seen[name] = { error: String(error) };
            await picture(name);
            await stop();
        }
        await picture(name);
        console.error(name, JSON.stringify(seen[name], null, 1));
    }
} catch (error) {
    seen.error = String(error);
} finally {
    await browser?.close();
    end();
    console.log(JSON.stringify(seen));
    setTimeout(() => process.exit(0), 2000);
}
