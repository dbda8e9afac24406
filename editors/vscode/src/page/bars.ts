// Throughput and peak memory as bars that are dragged to the batch size that gives them.

import type { Batch, Panel } from "../contract";
import { batchAfterKey, batchFor, canChoose, fullScale, offeredBatches, predictAt, type Interval, type Quantity } from "../model/batchCurve";
import { ofCapacity, perSecond, size, withInterval } from "../model/words";
import { element, place, section, share } from "./elements";

/** Both bars move together: they show one batch size. */
export class BatchBars {
  readonly root: HTMLElement;
  private readonly offered: readonly number[];
  private readonly bars: readonly Bar[];
  private readonly note = element("p", "note");
  private chosen: number;
  private accepted = false;
  /** A bar is held by the pointer. */
  held = false;

  constructor(private readonly panel: Panel, private readonly batch: Batch, private readonly write: (batch: number) => void) {
    this.chosen = batch.value;
    this.offered = offeredBatches(batch.points, batch.value);
    const quantities: readonly Quantity[] = ["samplesPerSecond", "peakBytes"];
    this.bars = quantities.map((quantity) => new Bar(quantity, this.scaleOf(quantity), this, panel.capacityBytes, canChoose(batch.points, this.offered, quantity)));
    this.note.setAttribute("aria-live", "polite");
    this.root = section("Batch size", ...this.bars.map((bar) => bar.root), this.note);
    this.show();
  }

  /** Someone is choosing: an update from the server must wait. */
  get busy(): boolean {
    return this.held || (this.chosen !== this.batch.value && !this.accepted);
  }

  get batches(): readonly number[] {
    return this.offered;
  }

  get value(): number {
    return this.chosen;
  }

  choose(batch: number): void {
    this.accepted = false;
    this.chosen = batch;
    this.show();
  }

  chooseAmount(quantity: Quantity, wanted: number): void {
    const batch = batchFor(this.batch.points, this.offered, quantity, wanted);
    if (batch !== null) this.choose(batch);
  }

  /** Write the chosen batch into the code. */
  accept(): void {
    if (this.accepted || this.chosen === this.batch.value) return;
    this.accepted = true;
    this.show();
    this.write(this.chosen);
  }

  cancel(): void {
    if (!this.accepted) this.choose(this.batch.value);
  }

  private scaleOf(quantity: Quantity): number | null {
    return fullScale(this.batch.points, this.offered, quantity, this.panel.capacityBytes);
  }

  private show(): void {
    const prediction = predictAt(this.batch.points, this.chosen);
    for (const bar of this.bars) bar.show(prediction?.[bar.quantity] ?? null, this.chosen, this.offered);
    const where = `line ${this.batch.line + 1}`;
    const change = `${this.batch.value} → ${this.chosen} on ${where}`;
    const changed = this.chosen !== this.batch.value;
    this.note.textContent = this.accepted ? `${change}: writing…`
      : changed ? `${change}, predicted. Release or press Enter to write it; Escape leaves it.`
      : `${this.batch.value} on ${where}. Drag a bar, or use the arrow keys, to try another.`;
    this.root.classList.toggle("choosing", changed);
  }
}

const TITLES = { samplesPerSecond: "Throughput", peakBytes: "Peak memory" } as const;
const WRITE = { samplesPerSecond: perSecond, peakBytes: size } as const;

class Bar {
  readonly root: HTMLElement;
  private readonly track = element("div", "track");
  private readonly fill = element("div", "fill");
  private readonly interval = element("div", "interval");
  private readonly handle = element("div", "handle");
  private readonly amount = element("span", "amount");

  constructor(readonly quantity: Quantity, private readonly scale: number | null, private readonly bars: BatchBars, private readonly capacityBytes: number | null, private readonly draggable: boolean) {
    this.track.append(this.fill, this.interval, this.handle);
    this.root = element("div", `bar ${quantity}`, element("div", "label", element("span", "", TITLES[quantity]), this.amount), this.track);
    if (quantity === "peakBytes" && scale !== null && capacityBytes !== null && capacityBytes <= scale) this.markCapacity(capacityBytes / scale);
    if (scale !== null && draggable) this.listen(scale);
    else this.root.classList.add("fixed");
  }

  /** There are predictions, and all are the same: parameters and the optimizer can take more than any batch. */
  private get isFlat(): boolean {
    return this.scale !== null && !this.draggable && this.bars.batches.length > 1;
  }

  show(amount: Interval | null, batch: number, offered: readonly number[]): void {
    this.amount.textContent = amount === null ? "not known" : this.words(amount) + (this.isFlat ? ", whatever the batch" : "");
    this.root.classList.toggle("nowhere", amount === null);
    this.root.classList.toggle("over", amount !== null && this.exceeds(amount.high));
    if (amount !== null && this.scale !== null) this.draw(amount, this.scale);
    if (this.root.classList.contains("fixed")) return;
    const values = { now: batch, min: Math.min(batch, ...offered), max: Math.max(batch, ...offered), text: `batch ${batch}: ${this.amount.textContent}` };
    for (const [name, value] of Object.entries(values)) this.track.setAttribute(`aria-value${name}`, String(value));
  }

  private words(amount: Interval): string {
    const words = withInterval(amount, WRITE[this.quantity]);
    if (this.quantity === "samplesPerSecond") return words;
    const verdict = this.exceeds(amount.value) ? ": does not fit" : this.exceeds(amount.high) ? ": may not fit" : "";
    return ofCapacity(words, this.capacityBytes) + verdict;
  }

  private exceeds(bytes: number): boolean {
    return this.quantity === "peakBytes" && this.capacityBytes !== null && bytes > this.capacityBytes;
  }

  private draw(amount: Interval, scale: number): void {
    place(this.fill, { width: share(amount.value / scale) });
    place(this.handle, { left: share(amount.value / scale) });
    place(this.interval, { left: share(amount.low / scale), width: share((Math.min(amount.high, scale) - amount.low) / scale) });
  }

  private markCapacity(at: number): void {
    const mark = element("div", "capacity");
    mark.title = "memory of this device";
    place(mark, { left: share(at) });
    this.track.append(mark);
  }

  private listen(scale: number): void {
    const { track, bars } = this;
    track.tabIndex = 0;
    track.setAttribute("role", "slider");
    track.setAttribute("aria-label", `${TITLES[this.quantity]}: batch size`);
    const follow = (event: PointerEvent): void => {
      const box = track.getBoundingClientRect();
      bars.chooseAmount(this.quantity, (scale * (event.clientX - box.left)) / Math.max(1, box.width));
    };
    track.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      bars.held = true;
      track.setPointerCapture(event.pointerId);
      follow(event);
    });
    track.addEventListener("pointermove", (event) => { if (bars.held) follow(event); });
    track.addEventListener("pointerup", () => this.endDrag(() => bars.accept()));
    track.addEventListener("pointercancel", () => this.endDrag(() => bars.cancel()));
    track.addEventListener("keydown", (event) => this.onKey(event));
    track.addEventListener("blur", () => { if (!bars.held) bars.cancel(); });
  }

  private endDrag(end: () => void): void {
    if (!this.bars.held) return;
    this.bars.held = false;
    end();
  }

  private leave(): void {
    this.bars.held = false;
    this.bars.cancel();
  }

  private onKey(event: KeyboardEvent): void {
    const batch = batchAfterKey(event.key, this.bars.value, this.bars.batches);
    if (batch !== null) this.bars.choose(batch);
    else if (event.key === "Enter") this.bars.accept();
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
  }
}
