// Drives Microsoft's test client of the Debug Adapter Protocol, for tests/dap_client.py.
//
//   node client.js HOST PORT
//
// Each line on stdin is a request, {"id": 1, "command": "threads", "arguments": {}}. Each line on
// stdout is its answer, {"id": 1, "success": true, "body": {}} or {"id": 1, "success": false,
// "message": "why"}, or an event, {"event": "stopped", "body": {}}. The events "connected",
// "failed" (with a message; the process then exits with 1) and "closed" are about the connection.
// Requests are not queued: debugpy answers "attach" only after "configurationDone".
// The end of stdin ends the process without a word to the adapter.
'use strict';

const net = require('net');
const readline = require('readline');
const { DebugClient } = require('@vscode/debugadapter-testsupport');

// stdout is a pipe, to which node writes synchronously: nothing is lost at process.exit().
const say = (message) => process.stdout.write(JSON.stringify(message) + '\n');

class Client extends DebugClient {
  // DebugClient.start() knows one host only, and a refused connection is an uncaught error there.
  open(host, port) {
    let connected = false;
    this._socket = net.createConnection(port, host, () => {
      connected = true;
      this.connect(this._socket, this._socket);
      say({ event: 'connected' });
    });
    this._socket.on('error', (error) => {
      if (!connected) {
        say({ event: 'failed', message: error.message || error.code });
        process.exit(1);
      }
    });
    this._socket.on('close', () => say({ event: 'closed' }));
  }

  // The adapter's events are all that a DebugClient emits.
  emit(name, event) {
    say({ event: name, body: event.body || {} });
    return true;
  }
}

const client = new Client('node', 'unused', 'debugpy');
client.open(process.argv[2], Number(process.argv[3]));

const input = readline.createInterface({ input: process.stdin });
input.on('line', (line) => {
  const request = JSON.parse(line);
  client.send(request.command, request.arguments).then(
    (response) => say({ id: request.id, success: true, body: response.body || {} }),
    (error) => say({ id: request.id, success: false, message: error.message }),
  );
});
input.on('close', () => process.exit(0));
