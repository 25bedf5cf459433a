// The first process of a pod: it holds the pod's namespaces, reaps orphans, and ends when asked.
#include <signal.h>
#include <unistd.h>

static void end(int signal) { _exit(0); }

int main(void) {
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGCHLD, SIG_IGN);
    for (;;) pause();
}
