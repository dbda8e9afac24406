// Memory through a step: a line under the pointer, and what is held there.

(() => {
  const at = (data, time) => {
    let low = 0;
    let high = data.time.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.time[middle] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  };

  function line(tip, words, strong) {
    const part = document.createElement(strong ? "strong" : "div");
    part.textContent = words;
    tip.append(part);
  }

  function show(tip, data, place) {
    tip.replaceChildren();
    line(tip, `${Format.bytes(data.allocated[place])} after ${Format.ns(data.time[place])}`, true);
    [...data.categories].reverse().forEach(([label, levels]) => {
      if (levels[place]) line(tip, `${label} ${Format.bytes(levels[place])}`);
    });
    if (data.reserved) line(tip, `reserved ${Format.bytes(data.reserved[place])}`);
    tip.hidden = false;
  }

  function follow(figure, svg) {
    const data = JSON.parse(svg.dataset.memory);
    const tip = figure.querySelector(".tip");
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const inside = x >= data.left && x <= data.right;
      cursor.toggleAttribute("hidden", !inside);
      tip.hidden = !inside;
      if (!inside) return;
      const time = ((x - data.left) / (data.right - data.left)) * data.last;
      cursor.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
      show(tip, data, at(data, time));
      const right = event.clientX + 18 + tip.offsetWidth > innerWidth;
      tip.style.left = `${right ? event.clientX - 18 - tip.offsetWidth : event.clientX + 18}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cursor.toggleAttribute("hidden", true);
    });
  }

  document.querySelectorAll(".mem-line").forEach((figure) => {
    const svg = figure.querySelector("svg[data-memory]");
    if (svg) follow(figure, svg);
  });
})();
