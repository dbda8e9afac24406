// Where the lanes lie: device lanes stay in sight at the top while the threads scroll under them.

const LANE_PAD = 5;

// Threads that hardly did anything, and rows that only annotate, start folded.
function foldMinorLanes(scene) {
  const threads = scene.lanes.filter((lane) => lane.group === "host");
  const notes = scene.lanes.filter((lane) => lane.group === "device" && !lane.work && !lane.idle);
  const busiest = Math.max(1, ...threads.map((lane) => lane.events));
  threads.forEach((lane, i) => (lane.folded = i > 0 && lane.events < busiest * 0.02));
  notes.forEach((lane) => (lane.folded = true));
}

function placeLanes(scene, room, scrollTop) {
  let total = 0;
  const lanes = scene.lanes.map((lane) => {
    const height = (lane.folded ? 1 : lane.rows) * ROW + 2 * LANE_PAD;
    const place = { lane, y: total, height, pinned: false };
    total += height;
    return place;
  });
  const height = Math.min(room, total);
  const device = lanes.filter((place) => place.lane.group === "device");
  const deviceHeight = device.reduce((sum, place) => sum + place.height, 0);
  const pinned = device.length < lanes.length && deviceHeight <= height * 0.5 ? deviceHeight : 0;
  device.forEach((place) => (place.pinned = pinned > 0));
  const idle = scene.lanes.find((lane) => lane.idle);
  return {
    lanes, pinned, total, height,
    width: 0,
    pad: LANE_PAD,
    gapRow: idle ? idle.first_row : -1,
    top: (place) => (place.pinned ? place.y : place.y - scrollTop()),
    placeOf: (s, event) => lanes[s.laneOfRow[s.rowOf(event)]],
  };
}

function fillGutter(gutter, layout, onToggle) {
  const pinned = document.createElement("div");
  pinned.className = "tl-pinned";
  pinned.style.height = `${layout.pinned}px`;
  gutter.replaceChildren(pinned);
  for (const place of layout.lanes) (place.pinned ? pinned : gutter).append(laneLabel(place, onToggle));
}

function laneLabel({ lane, y, height }, onToggle) {
  const foldable = lane.rows > 1;
  const label = document.createElement(foldable ? "button" : "div");
  label.className = "tl-label";
  label.style.top = `${y}px`;
  label.style.height = `${height}px`;
  label.title = `${lane.name}: ${Format.count(lane.events)} ${lane.idle ? "gaps" : "events"}`;
  const fold = document.createElement("span");
  fold.className = "tl-fold";
  fold.setAttribute("aria-hidden", "true");
  fold.textContent = foldable ? (lane.folded ? "▸" : "▾") : "";
  const name = document.createElement("span");
  name.className = "tl-name";
  name.textContent = lane.name;
  label.append(fold, name);
  if (foldable) {
    label.type = "button";
    label.setAttribute("aria-expanded", String(!lane.folded));
    label.addEventListener("click", () => onToggle(lane));
  }
  return label;
}
