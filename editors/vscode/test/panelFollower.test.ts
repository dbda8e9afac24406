// Which script is shown: the last that was asked for, whatever order answers come in.

import assert from "node:assert/strict";
import { test } from "node:test";

import type { Shown } from "../src/messages";
import { PanelFollower } from "../src/panelFollower";
import { SCRIPT, rawPanel } from "./panels";

const OTHER = "file:///home/someone/other.py";

/** A server whose answers come when the test says so. */
function slowServer(): { follower: PanelFollower; asked: string[]; answer: (value: unknown) => Promise<void>; refuse: (error: Error) => Promise<void>; last: () => Shown } {
  const asked: string[] = [];
  const open: { resolve: (value: unknown) => void; reject: (error: Error) => void }[] = [];
  const all: Shown[] = [];
  const follower = new PanelFollower({
    ask: (uri) => new Promise((resolve, reject) => { asked.push(uri); open.push({ resolve, reject }); }),
    show: (shown) => void all.push(shown),
  });
  const settle = async (): Promise<void> => { for (let i = 0; i < 5; i++) await Promise.resolve(); };
  return {
    follower, asked,
    answer: (value) => { open.shift()?.resolve(value); return settle(); },
    refuse: (error) => { open.shift()?.reject(error); return settle(); },
    last: () => all.at(-1) ?? assert.fail("nothing was shown"),
  };
}

test("the active script's panel is asked for and shown", async () => {
  const { follower, asked, answer, last } = slowServer();
  void follower.activate(SCRIPT);
  assert.deepEqual([last().script, last().panel], ["train.py", null]);
  await answer(rawPanel());
  assert.deepEqual(asked, [SCRIPT]);
  assert.equal(last().panel?.stepMs, 42);
});

test("an answer for a script that is no longer shown is dropped", async () => {
  const { follower, asked, answer, last } = slowServer();
  void follower.activate(SCRIPT);
  void follower.activate(OTHER);
  await answer(rawPanel({ stepMs: 1 }));
  assert.equal(last().panel, null);
  await answer(rawPanel({ stepMs: 2 }));
  assert.deepEqual(asked, [SCRIPT, OTHER]);
  assert.deepEqual([last().script, last().panel?.stepMs], ["other.py", 2]);
});

test("a hundred changes while one answer is awaited make one more question", async () => {
  const { follower, asked, answer } = slowServer();
  void follower.activate(SCRIPT);
  for (let i = 0; i < 100; i++) void follower.changed({ uri: SCRIPT });
  await follower.changed({ uri: OTHER });
  await answer(rawPanel());
  await answer(rawPanel());
  assert.equal(asked.length, 2);
});

test("a jump into another file keeps the script's panel; opening that file by hand does not", async () => {
  const { follower, answer, last } = slowServer();
  void follower.activate(SCRIPT);
  await answer(rawPanel());
  follower.jumpingTo(OTHER);
  void follower.activate(OTHER);
  assert.equal(last().script, "train.py");
  void follower.activate(OTHER);
  assert.equal(last().script, "other.py");
});

test("failures are told and end with the next answer", async () => {
  const { follower, answer, refuse, last } = slowServer();
  void follower.activate(SCRIPT);
  await refuse(new Error("the server is gone"));
  assert.equal(last().problem, "the server is gone");
  void follower.changed({ uri: SCRIPT });
  await answer(rawPanel());
  assert.equal(last().problem, null);
});

test("live values are those of the shown script and end with the run or the server", async () => {
  const { follower, answer, last } = slowServer();
  void follower.activate(SCRIPT);
  await answer(rawPanel());
  follower.live({ uri: OTHER, running: true, step: 1 });
  assert.equal(last().live, null);
  follower.live({ uri: SCRIPT, running: true, step: 7 });
  assert.equal(last().live?.step, 7);
  follower.fail("ended");
  assert.deepEqual([last().live, last().problem], [null, "ended"]);
  follower.live({ uri: SCRIPT, running: true, step: 8 });
  follower.live({ uri: SCRIPT, running: false });
  assert.equal(last().live, null);
});
