// Puts the page together, and offers tests and scripts a small handle: window.stepscope.

(() => {
  const $ = (selector) => document.querySelector(selector);
  const help = $("#help");
  const timeline = new Timeline($("#timeline .tl"));
  const flames = { host: new FlameGraph($("#flame-host")), device: new FlameGraph($("#flame-device")) };
  const tables = new Tables($("#tables"), (name) => {
    $("#timeline").scrollIntoView({ block: "start" });
    timeline.find(name);
  });
  const together = $("#ranks") ? new Together($("#ranks"), pickRank) : null;
  const whatif = WhatIf.start();
  const state = { rank: -1, ready: false };

  // Of many ranks only some have tables and a timeline in the page.
  function pickRank(number) {
    const option = [...$("#rank-picker").options].find((each) => Number(each.dataset.number) === number);
    if (!option) return;
    $("#rank-picker").value = option.value;
    showRank(Number(option.value));
    $("#timeline").scrollIntoView({ block: "start" });
  }

  function showNothing(why) {
    $("#timeline .tl").hidden = Boolean(why);
    $("#timeline .tl-none").hidden = !why;
    $("#timeline .tl-none").textContent = why;
  }

  function showPicture(data) {
    const scene = data.picture ? new Scene(data) : null;
    $("#flames").hidden = !scene;
    $(".tl-left-out").textContent = scene ? scene.leftOut : "";
    $(".tl-left-out").hidden = !scene?.leftOut;
    showNothing(scene ? (scene.start.length ? "" : "No events to draw.") : "This rank was not drawn.");
    if (!scene) return;
    if (scene.start.length) timeline.load(scene);
    ["host", "device"].forEach((side, i) => showFlame(side, data, data.picture.flames_left_out[i]));
  }

  function showFlame(side, data, leftOut) {
    const root = $(`#flame-${side}`);
    const tree = new FlameTree(data.columns, side, data.picture.strings);
    root.hidden = !tree.size;
    root.querySelector(".flame-left-out").textContent = leftOut
      ? `${Format.count(leftOut)} of the narrowest stacks are left out.` : "";
    if (tree.size) flames[side].load(tree);
  }

  async function unpack(index) {
    try {
      return await Payload.load($(`#payload-${index}`));
    } catch (error) {
      showNothing(`This browser could not unpack the report's data (${error.message}).`);
      $("#flames").hidden = $("#tables").hidden = true;
      return null;
    }
  }

  async function showRank(index) {
    state.ready = false;
    document.querySelectorAll("[data-rank]").forEach((part) => (part.hidden = Number(part.dataset.rank) !== index));
    const data = await unpack(index);
    if (!data) return;
    if ($("#rank-picker") && Number($("#rank-picker").value) !== index) return;
    state.rank = index;
    showPicture(data);
    tables.load(data.tables);
    state.ready = true;
  }

  function repaint() {
    timeline.draw();
    flames.host.draw();
    flames.device.draw();
    together?.draw();
    if (timeline.scene) timeline.showDetail();
    $("#theme").setAttribute("aria-pressed", String(Theme.current() === "dark"));
  }

  function print(printing) {
    // The canvases keep the width they have on the screen; paper shows them smaller.
    const width = document.querySelector("main").clientWidth;
    document.documentElement.style.setProperty("--print-zoom", String(Math.min(1, 700 / width)));
    const views = [timeline, flames.host, flames.device, together].filter(Boolean);
    Theme.onPaper(printing, () => views.forEach((view) => view.drawNow()));
  }

  Theme.start($("#theme"), repaint);
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  listenToKeys(timeline, help);
  document.querySelectorAll("[data-help]").forEach((b) => b.addEventListener("click", () => toggleHelp(help)));
  help.addEventListener("click", (e) => e.target === help && help.close());
  $("#rank-picker")?.addEventListener("change", (e) => showRank(Number(e.target.value)));
  document.querySelectorAll("[data-copy]").forEach((button) =>
    button.addEventListener("click", () => copyText(button)));

  const started = showRank($("#rank-picker") ? Number($("#rank-picker").value) : 0);
  window.stepscope = {
    ready: Promise.all([started, together?.load(), whatif?.ready]).then(() => undefined),
    showRank,
    together,
    whatif,
    find: (text) => timeline.find(text),
    // Draws at once and reads a pixel back, so that the time includes the drawing itself.
    redraw() {
      const began = performance.now();
      timeline.drawNow();
      timeline.canvas.getContext("2d").getImageData(0, 0, 1, 1);
      return performance.now() - began;
    },
    state: () => ({
      ready: state.ready,
      rank: state.rank,
      theme: Theme.current(),
      view: timeline.view ? [timeline.view.t0, timeline.view.t1] : null,
      span: timeline.scene ? timeline.scene.span : 0,
      events: timeline.scene ? timeline.scene.drawn : 0,
      matches: timeline.found ? timeline.found.events.length : 0,
      match: timeline.match ?? -1,
      selected: timeline.selected >= 0 ? timeline.scene.label(timeline.selected) : null,
      lastFrameMs: timeline.frameMs,
      table: tables.table ? tables.table.id : null,
      ...together?.state(),
    }),
  };
})();

async function copyText(button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the path to copy it";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
