// What an event is, in words: the tip beside the pointer and the panel under the timeline.

const KIND_WORDS = {
  compute: "compute kernel", comm: "communication", memory: "copy or memset",
  device_sync: "device sync", device_annotation: "device annotation", device_other: "device",
  operator: "operator", annotation: "annotation", python_call: "Python function",
  runtime: "runtime call", overhead: "profiler overhead", host_other: "host",
};

function element(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function eventFacts(scene, event) {
  const kind = Palette.KINDS[scene.kind[event]];
  return [
    Format.ns(scene.dur[event]),
    `at ${Format.ns(scene.start[event])}`,
    event >= scene.drawn ? "device idle" : KIND_WORDS[kind] || kind,
  ];
}

// The Python function that ran on the host while the device was idle.
function idleFrame(scene, event) {
  const frame = event >= scene.drawn ? scene.frame[event - scene.drawn] : 0;
  return frame ? [`host was in ${Format.short(scene.strings[frame - 1])}`] : [];
}

function tipTitle(label) {
  return element("strong", "", label.length > 220 ? `${label.slice(0, 220)}…` : label);
}

function fillTip(tip, scene, event) {
  const lines = [eventFacts(scene, event).join("  ·  "), ...idleFrame(scene, event)];
  tip.replaceChildren(tipTitle(scene.label(event)), ...lines.map((line) => element("div", "", line)));
  tip.hidden = false;
}

// Beside the pointer, but never out of the window.
function placeTip(tip, pointer) {
  const box = tip.getBoundingClientRect();
  const x = Math.min(pointer.clientX + 14, window.innerWidth - box.width - 10);
  const below = pointer.clientY + 18;
  const y = below + box.height > window.innerHeight - 8 ? pointer.clientY - box.height - 12 : below;
  tip.style.left = `${Math.max(6, x)}px`;
  tip.style.top = `${Math.max(6, y)}px`;
}

function fillDetail(detail, scene, event, launched, onGo) {
  detail.classList.toggle("is-empty", event < 0);
  if (event < 0) {
    detail.textContent = "Click an event for details. Drag to pan, scroll to zoom, press ? for keys.";
    return;
  }
  const title = element("div", "tl-title");
  const swatch = element("span", "swatch");
  swatch.style.background = Palette.get().solid[scene.kind[event]];
  title.append(swatch, element("code", "", scene.label(event)));
  const facts = [...eventFacts(scene, event), `on ${scene.laneOf(event).name}`, ...idleFrame(scene, event)];
  detail.replaceChildren(title, element("div", "tl-facts", facts.join("  ·  ")));
  if (event < scene.drawn) detail.append(eventLinks(scene, event, launched, onGo));
}

// Ways on from an event: what launched it, what it launched, what called it.
function eventLinks(scene, event, launched, onGo) {
  const links = element("div", "tl-links");
  const add = (text, target) => {
    const button = element("button", "link", text);
    button.type = "button";
    button.title = scene.label(target);
    button.addEventListener("click", () => onGo(target));
    links.append(button);
  };
  const launch = scene.link[event];
  if (launch >= 0) {
    const wait = Format.ns(scene.start[event] - scene.start[launch]);
    add(`Launched by ${scene.shortLabel(launch)}, ${wait} before`, launch);
  } else if (launched.length) {
    const sum = launched.reduce((total, e) => total + scene.dur[e], 0);
    const what = launched.length > 1 ? "device events" : "device event";
    add(`Launched ${Format.count(launched.length)} ${what}, ${Format.ns(sum)}`, launched[0]);
  }
  const callers = scene.ancestors(launch >= 0 ? launch : event).slice(0, 5);
  callers.forEach((above) => add(`in ${scene.shortLabel(above)}`, above));
  return links;
}
