// The lines that a kernel prints. Only one thread prints, because all threads would print too many lines.
#include "runtime.h"

#include <stdarg.h>
#include <stdio.h>

static char text[MSL_PRINTED_BYTES];
static unsigned used;

void print_begin(void) { text[used = 0] = 0; }

static int may_print(const msl_thread* at) {
  for (int i = 0; i < 3; i++)
    if (at->group->position[i] * at->group->dispatched[i] + at->position[i] != options.print_from[i]) return 0;
  return 1;
}

void msl_print(const char* format, ...) {
  if (!may_print(&running->thread)) return;
  unsigned room = sizeof text - used;
  va_list values;
  va_start(values, format);
  int wanted = vsnprintf(text + used, room, format, values);
  va_end(values);
  if (wanted < 0 || (unsigned)wanted + 1 >= room) text[used] = 0;  // no space left: drop the line
  else {
    used += (unsigned)wanted;
    if (wanted && text[used - 1] != '\n') text[used++] = '\n';
    text[used] = 0;
  }
}

const char* msl_printed(void) { return text; }
