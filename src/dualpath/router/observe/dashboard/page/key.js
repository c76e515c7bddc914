
// The API key a router may ask for: from the address, `#key=…`, or typed in; stored for this tab only.

const KEY_ITEM = "dualpath-api-key";

/** Removes the key from the address, so that it is not copied with the address. */
function keyFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given === null) return;
  keepKey(given);
  history.replaceState(null, "", location.pathname + location.search);
}

function keepKey(key) {
  try {
    sessionStorage.setItem(KEY_ITEM, key);
  } catch {
    // Storage may be forbidden; then the key lasts as long as the page.
  }
  keepKey.held = key;
}

function keyHeaders() {
  let key = keepKey.held;
  try {
    key ??= sessionStorage.getItem(KEY_ITEM);
  } catch {
    // As above.
  }
  return key ? { Authorization: `Bearer ${key}` } : {};
}
