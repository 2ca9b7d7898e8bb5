// The menu's button is a label: the theme opens it on Enter, but the Tab key does not reach it by itself.
for (const menu of document.querySelectorAll('.md-header__button[for="__drawer"]')) {
  menu.tabIndex = 0;
  menu.setAttribute("role", "button");
  menu.setAttribute("aria-label", "Menu");
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
