// The pane with one rank's tables.

import { partIn } from "./dom.js";
import { registerPane } from "./registry.js";
import { TableBox } from "./table_box.js";

registerPane("tables", (section, page) => {
  const box = new TableBox(partIn(section, ".panel"), page.findEvent);
  return {
    showRank(data) {
      section.hidden = !data;
      if (data) box.load(data.tables);
    },
    state: () => ({ table: box.table?.id ?? null }),
  };
});
