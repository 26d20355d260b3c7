// First program of a container whose job may reach the gateway: a door on loopback that leads to the runner's socket,
// then the job as its child. Bytes are never looked at; the container ends with the job. `door.js SOCKET PORT ARGV…`
'use strict';
const net = require('net');
const { spawn } = require('child_process');
const os = require('os');

const [socket, port, ...argv] = process.argv.slice(2);

const door = net.createServer({ allowHalfOpen: true }, (inside) => {
  const outside = net.connect({ path: socket, allowHalfOpen: true });
  for (const [from, to] of [[inside, outside], [outside, inside]]) {
    from.on('error', () => to.destroy());
    from.on('close', () => to.destroy());
    from.pipe(to);
  }
});

door.listen(Number(port), '127.0.0.1', () => {
  const job = spawn(argv[0], argv.slice(1), { stdio: ['ignore', 'inherit', 'inherit'] });
  job.on('error', (error) => {
    console.error(`cannot run ${argv[0]}: ${error.message}`);
    process.exit(127);
  });
  job.on('exit', (code, signal) => process.exit(signal ? 128 + os.constants.signals[signal] : code));
});
process.on('SIGTERM', () => process.exit(143));
