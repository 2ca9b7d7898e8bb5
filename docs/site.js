// The menu's button is a label, which the Tab key does not reach. `for` is what the theme's styles know it by.
for (const label of document.querySelectorAll('.md-header__button[for="__drawer"]')) {
  const menu = document.createElement("button");
  menu.className = label.className;
  menu.setAttribute("for", "__drawer");
  menu.setAttribute("aria-label", "Menu");
  menu.append(...label.childNodes);
  menu.addEventListener("click", () => document.getElementById("__drawer").click());
  label.replaceWith(menu);
}
// The search takes a dash before a word for "without it", so that no option would be found by its name.
document.addEventListener("input", ({ target }) => {
  if (target.matches('[data-md-component="search-query"]')) target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
}, true);
// The search is a dialog without a name, and what scrolls sideways cannot be scrolled by keys in every browser.
document.querySelector(".md-search").setAttribute("aria-label", "Search");
addEventListener("load", () => {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
