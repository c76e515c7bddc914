
// Numbers with their units, three significant digits.

const NOTHING = "–";
const PREFIXES = ["", "k", "M", "G", "T", "P"];

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function scaled(value) {
  let size = Math.abs(value);
  let step = 0;
  while (size >= 999.5 && step < PREFIXES.length - 1) {
    size /= 1000;
    step += 1;
  }
  const digits = step === 0 && Number.isInteger(value) ? 0 : size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return [`${value < 0 ? "−" : ""}${size.toFixed(digits)}`, PREFIXES[step]];
}

function withUnit(value, unit) {
  if (!known(value)) return NOTHING;
  if (value === 0) return `0 ${unit}`;
  const [number, prefix] = scaled(value);
  return `${number} ${prefix}${unit}`;
}

const asBytes = (value) => withUnit(value, "B");
const asByteRate = (value) => withUnit(value, "B/s");

function asCount(value) {
  if (!known(value)) return NOTHING;
  const [number, prefix] = scaled(value);
  return `${number}${prefix}`;
}

const asTokens = (value) => (known(value) ? `${asCount(value)} tok` : NOTHING);
const asTokenRate = (value) => (known(value) ? `${asCount(value)} tok/s` : NOTHING);

function asSeconds(value) {
  if (!known(value)) return NOTHING;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 0.9995) return withUnitOf(value * 1000, "ms");
  return withUnitOf(value, "s");
}

function withUnitOf(value, unit) {
  const size = Math.abs(value);
  const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  const number = size >= 999.5 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
  return `${number} ${unit}`;
}

function asShare(value) {
  return known(value) ? `${Math.round(value * 100)} %` : NOTHING;
}

function asAge(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h`;
}

function ratio(part, whole) {
  return known(part) && known(whole) && whole > 0 ? part / whole : null;
}

function sum(values) {
  return values.reduce((total, value) => total + (known(value) ? value : 0), 0);
}

function counted(number, noun) {
  return `${asCount(number)} ${number === 1 ? noun : `${noun}s`}`;
}

/** Quantile with linear interpolation of numbers in any order; null without any. */
function quantile(values, q) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = q * (sorted.length - 1);
  const low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}
