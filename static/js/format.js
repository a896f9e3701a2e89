// Numbers, sizes and times as people read them.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const share = new Intl.NumberFormat("en", {
  style: "percent",
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});
const clockSeconds = new Intl.DateTimeFormat("en", { timeStyle: "medium", hourCycle: "h23" });
const clockMinutes = new Intl.DateTimeFormat("en", { timeStyle: "short", hourCycle: "h23" });

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export const count = (number) => whole.format(number);

export const short = (number) => compact.format(number);

export const percent = (part) => share.format(part);

/** Part of a whole in [0, 1]; 0 of nothing. */
export const ratio = (part, all) => (all > 0 ? Math.min(1, Math.max(0, part / all)) : 0);

export function bytes(number) {
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  return `${number.toFixed(digits)} ${UNITS[unit]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  if (ms < 99_950) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.round(ms / 60_000)} min`;
}

export const clock = (unixSeconds) => clockSeconds.format(unixSeconds * 1000);

export const clockShort = (unixSeconds) => clockMinutes.format(unixSeconds * 1000);
