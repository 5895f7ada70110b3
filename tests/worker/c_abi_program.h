/* What the programs in C99 that use phub.h have in common: checks, and a server of their own. */
#ifndef PHUB_TESTS_WORKER_C_ABI_PROGRAM_H
#define PHUB_TESTS_WORKER_C_ABI_PROGRAM_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "worker/phub.h"

static char server[128];
static pid_t server_pid;
static void stop_server(void) { kill(server_pid, SIGTERM); }

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              phub_last_error());                                                             \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)
#define OK(call) CHECK((call) == PHUB_OK)
/* It fails with this code, and the message has these words. */
#define FAILS(call, code, words) CHECK((call) == (code) && strstr(phub_last_error(), (words)))

__attribute__((unused)) static void start_server(const char* program) {
  int ends[2];
  FILE* output;
  char line[512];
  CHECK(pipe(ends) == 0);
  server_pid = fork();
  if (server_pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    dup2(ends[1], 1);
    execl(program, program, "serve", "--listen", "127.0.0.1:0", "--cores", "1", "--pin", "false",
          (char*)NULL);
    _exit(127);
  }
  CHECK(server_pid > 0);
  atexit(stop_server);
  close(ends[1]);
  output = fdopen(ends[0], "r");
  CHECK(output != NULL);
  while (fgets(line, sizeof line, output) != NULL) {
    if (sscanf(line, "listening on %127s", server) == 1) return; /* `output` stays open */
  }
  fprintf(stderr, "%s serve did not start\n", program);
  exit(1);
}

#endif /* PHUB_TESTS_WORKER_C_ABI_PROGRAM_H */
