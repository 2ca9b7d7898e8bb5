// The menu's button is a label: the theme opens it on Enter, but the Tab key does not reach it by itself.
for (const menu of document.querySelectorAll('.md-header__button[for="__drawer"]')) {
  menu.tabIndex = 0;
  menu.setAttribute("role", "button");
  menu.setAttribute("aria-label", "Menu");
}
