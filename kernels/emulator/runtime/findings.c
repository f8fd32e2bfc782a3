// The findings of a dispatch. Equal mistakes, and equal notes, are one report with a count.
#include "runtime.h"

#include <string.h>

msl_report failure;
static msl_report* reports;
static unsigned used, mistakes;

void findings_begin(msl_report* room) {
  reports = room;
  used = mistakes = 0;
  memset(&failure, 0, sizeof failure);
}

static int same_text(const char* a, const char* b) { return a == b || (a && b && !strcmp(a, b)); }

static int same_site(const msl_site* a, const msl_site* b) {
  return a->line == b->line && same_text(a->what, b->what) && same_text(a->file, b->file);
}

static int same(const msl_report* a, const msl_report* b) {
  return a->kind == b->kind && a->code == b->code && a->other_code == b->other_code && same_site(&a->site, &b->site) &&
         same_site(&a->other, &b->other);
}

int findings_add(msl_report* one) {
  int is_note = one->kind >= MSL_FIRST_NOTE, room = 1;
  unsigned place = 0;
  while (place < used && !same(&reports[place], one)) place++;
  if (place < used) reports[place].times++;
  else if ((is_note ? used - mistakes : mistakes) == MSL_MAX_FINDINGS) room = 0;
  else {
    reports[used] = *one;
    reports[used++].times = 1;
    mistakes += !is_note;
  }
  memset(one, 0, sizeof *one);
  return room;
}

unsigned findings_count(void) { return mistakes; }

unsigned findings_end(void) {
  for (unsigned i = 0; i < used; i++) signals_locate(&reports[i]);
  return used;
}
