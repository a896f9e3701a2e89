// Numbers, sizes and times as people read them, in the language of the page.

import { language } from "./i18n.js";

const whole = new Intl.NumberFormat(language);
const compact = new Intl.NumberFormat(language, { notation: "compact", maximumFractionDigits: 1 });
const share = new Intl.NumberFormat(language, {
  style: "percent",
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});
const clockSeconds = new Intl.DateTimeFormat(language, { timeStyle: "medium", hourCycle: "h23" });
const clockMinutes = new Intl.DateTimeFormat(language, { timeStyle: "short", hourCycle: "h23" });

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

const units = (unit, digits, unitDisplay) =>
  new Intl.NumberFormat(language, {
    style: "unit",
    unit,
    unitDisplay,
    maximumFractionDigits: digits,
    signDisplay: "negative",
  });
const MILLISECONDS = units("millisecond", 0, "narrow");
const SECONDS = units("second", 1, "narrow");
const MINUTES = units("minute", 1, "short");
const HOURS = units("hour", 1, "short");

/** A length of time that may be negative, in the language of the page. */
export function span(ms) {
  const size = Math.abs(ms);
  if (size < 999.5) return MILLISECONDS.format(ms);
  if (size < 99_950) return SECONDS.format(ms / 1000);
  if (size < 5_990_000) return MINUTES.format(ms / 60_000);
  return HOURS.format(ms / 3_600_000);
}

const days = new Intl.DateTimeFormat(language, { month: "short", day: "numeric" });
const dayAndClock = new Intl.DateTimeFormat(language, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});

export const day = (unixSeconds) => days.format(unixSeconds * 1000);

export const dayClock = (unixSeconds) => dayAndClock.format(unixSeconds * 1000);

export const clock = (unixSeconds) => clockSeconds.format(unixSeconds * 1000);

export const clockShort = (unixSeconds) => clockMinutes.format(unixSeconds * 1000);
