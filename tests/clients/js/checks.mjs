// Checks of a client library: each prints its outcome as a line of JSON. The environment has the servers.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const baseURL = `${process.env.BASE_URL}/v1`;
// A server of four slots and no queue.
export const busyURL = `${process.env.BUSY_URL}/v1`;
export const apiKey = process.env.API_KEY;
export const model = "builtin";
export const messages = [{ role: "user", content: "Tell me a story." }];

/** Run the checks of a package; `checks` has asynchronous functions by their names. */
export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  for (const [check, work] of Object.entries(checks)) {
    let error = null;
    try {
      await work();
    } catch (found) {
      error = String(found.stack);
    }
    console.log(JSON.stringify({ client: `${name} ${version} (npm)`, check, error }));
  }
}

/** Check the error that a promise is rejected with: its class and some of its fields. */
export async function rejects(work, kind, fields) {
  await assert.rejects(work, (error) => {
    const found = Object.fromEntries(Object.keys(fields).map((key) => [key, error[key]]));
    assert.ok(error instanceof kind, `expected ${kind.name}, found ${error}`);
    assert.deepEqual(found, fields);
    return true;
  });
}

export async function collected(stream) {
  const found = [];
  for await (const item of stream) found.push(item);
  return found;
}
