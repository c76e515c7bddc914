
// Elements. Text goes in as text nodes only, so that no name of an engine can become markup, and
// colours as classes: the page's policy allows no style attributes.

const SVG_SPACE = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

/** A bar of `share` (0 to 1) of its width. */
function meter(share) {
  const bar = h("i");
  bar.style.width = `${Math.round(Math.min(Math.max(share, 0), 1) * 100)}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, bar);
}
