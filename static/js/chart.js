// Prompt tokens over time: bars of cached tokens, and computed ones on top of them.
/* global uPlot */

import { byId, element, setText } from "./dom.js";
import { clock, clockShort, count, day, dayClock, short } from "./format.js";
import { t } from "./i18n.js";

const WINDOWS = {
  "1s": { width: 1, length: 300 },
  "10s": { width: 10, length: 360 },
  "1m": { width: 60, length: 1440 },
  "1h": { width: 3600, length: 720 },
};
const DAY = 86_400;

/** Buckets by time; [time, computed, cached, generated, requests, ..]. */
export class Chart {
  #rows = new Map();
  #marks = []; // [time, what happened]
  #res = "1s";
  #plot = null;
  #place = byId("chart");

  constructor() {
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.#place);
    document.addEventListener("omlx:theme", () => this.#rebuild());
    byId("table-button").addEventListener("click", () => this.#toggleTable());
  }

  get res() {
    return this.#res;
  }

  /** Show another resolution, with all its buckets. */
  load(res, rows, marks) {
    const isNew = res !== this.#res || !this.#plot;
    this.#res = res;
    this.#marks = marks;
    this.#rows = new Map(rows.map((row) => [row[0], row]));
    setText(byId("bucket"), t(`overview.bucket.${res}`));
    if (isNew) this.#rebuild();
    else this.#draw();
  }

  /** Take over buckets that changed. */
  update(rows) {
    for (const row of rows) this.#rows.set(row[0], row);
    const excess = this.#rows.size - WINDOWS[this.#res].length;
    for (const time of [...this.#rows.keys()].slice(0, Math.max(0, excess))) {
      this.#rows.delete(time);
    }
    if (this.#plot) this.#draw();
  }

  #span() {
    const { width, length } = WINDOWS[this.#res];
    const newest = Math.max(...this.#rows.keys());
    return [newest - (length - 1) * width, newest + width];
  }

  #data() {
    const rows = [...this.#rows.values()];
    return [
      rows.map((row) => row[0]),
      rows.map((row) => row[1] + row[2]),
      rows.map((row) => row[2]),
    ];
  }

  #size() {
    return { width: this.#place.clientWidth, height: this.#place.clientHeight };
  }

  #draw() {
    this.#plot.setData(this.#data());
    byId("chart-empty").hidden = [...this.#rows.values()].some((row) => row[1] || row[2]);
    if (!byId("table-view").hidden) this.#fillTable();
  }

  #rebuild() {
    this.#plot?.destroy();
    if (!this.#rows.size) return;
    // Colours come from the elements that the style sheet has coloured.
    const colour = (id) => getComputedStyle(byId(id)).backgroundColor;
    const soft = getComputedStyle(byId("bucket")).color;
    const line = getComputedStyle(byId("table-view")).borderTopColor;
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const bars = uPlot.paths.bars({ size: [0.86, 26], align: 1 });
    const series = (fill) => ({ fill, width: 0, paths: bars, points: { show: false } });
    const axis = { stroke: soft, font, ticks: { show: false } };
    this.#plot = new uPlot(
      {
        ...this.#size(),
        padding: [8, 2, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
        scales: {
          x: { range: () => this.#span() },
          y: { range: (_plot, _min, max) => [0, max > 0 ? max * 1.08 : 100] },
        },
        axes: [
          {
            ...axis,
            size: 28,
            grid: { show: false },
            space: 52,
            values: (_plot, times) => times.map(this.#labels(times)),
          },
          {
            ...axis,
            size: 50,
            space: 44,
            grid: { stroke: line, width: 1 },
            values: (_plot, numbers) => numbers.map((number) => short(number)),
          },
        ],
        series: [{}, series(colour("key-computed")), series(colour("key-cached"))],
        hooks: {
          setCursor: [(plot) => this.#read(plot.cursor.idx)],
          draw: [(plot) => this.#drawMarks(plot, soft)],
        },
      },
      this.#data(),
      this.#place,
    );
    this.#draw();
  }

  #labels(times) {
    if (WINDOWS[this.#res].width * WINDOWS[this.#res].length > DAY) return day;
    return times.every((time) => time % 60 === 0) ? clockShort : clock;
  }

  /** A dashed line where something happened that explains a change. */
  #drawMarks(plot, colour) {
    const { left, top, width, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.strokeStyle = colour;
    plot.ctx.lineWidth = devicePixelRatio;
    plot.ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const [time] of this.#marks) {
      const x = Math.round(plot.valToPos(time, "x", true));
      if (x < left || x > left + width) continue;
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, top);
      plot.ctx.lineTo(x, top + height);
      plot.ctx.stroke();
    }
    plot.ctx.restore();
  }

  /** When a bucket began. */
  #when(time) {
    return WINDOWS[this.#res].width >= 60 ? dayClock(time) : clock(time);
  }

  #read(index) {
    const row = index === null || index === undefined ? null : [...this.#rows.values()][index];
    const text = row
      ? t("overview.chart.readout", { time: this.#when(row[0]), cached: row[2], computed: row[1] })
      : "";
    const width = WINDOWS[this.#res].width;
    const marked = this.#marks.filter(([time]) => row && time >= row[0] && time < row[0] + width);
    const kinds = [...new Set(marked.map(([, kind]) => kind))];
    const words = kinds.map((kind) => t(`overview.chart.mark.${kind}`));
    setText(byId("readout"), [text, ...words].filter(Boolean).join(" · "));
  }

  #toggleTable() {
    const view = byId("table-view");
    const button = byId("table-button");
    view.hidden = !view.hidden;
    button.setAttribute("aria-expanded", String(!view.hidden));
    setText(button, view.hidden ? t("overview.table.show") : t("overview.table.hide"));
    if (!view.hidden) this.#fillTable();
  }

  #fillTable() {
    const cell = (text, kind) => element("td", { class: kind }, text);
    const rows = [...this.#rows.values()]
      .filter((row) => row.slice(1).some(Boolean))
      .reverse()
      .map(([time, computed, cached, generated, requests]) =>
        element(
          "tr",
          {},
          cell(this.#when(time)),
          ...[cached, computed, generated, requests].map((number) => cell(count(number), "num")),
        ),
      );
    if (!rows.length) {
      rows.push(element("tr", {}, element("td", { colspan: 5 }, t("overview.table.empty"))));
    }
    byId("table-rows").replaceChildren(...rows);
  }
}
