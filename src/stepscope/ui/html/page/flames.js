// The pane with the flame graphs of the host and of the device.

import { partIn } from "./dom.js";
import { FlameGraph, FlameTree } from "./flame_graph.js";
import { count } from "./format.js";
import { registerPane } from "./registry.js";

registerPane("flames", (section) => {
  const graphs = ["host", "device"].map((side) => new FlameGraph(partIn(section, `#flame-${side}`)));
  return {
    showRank(data) {
      const picture = data?.picture;
      section.hidden = !picture;
      if (!picture) return;
      ["host", "device"].forEach((side, i) => {
        const tree = new FlameTree(data.columns, side, picture.strings);
        const leftOut = picture.flames_left_out[i];
        const { root } = graphs[i];
        root.hidden = !tree.size;
        partIn(root, ".flame-left-out").textContent = leftOut
          ? `${count(leftOut)} of the narrowest stacks are left out.` : "";
        if (tree.size) graphs[i].load(tree);
      });
    },
    draw: () => graphs.forEach((graph) => graph.draw()),
    drawNow: () => graphs.forEach((graph) => graph.drawNow()),
  };
});
