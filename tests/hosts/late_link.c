/* A switch whose frames arrive late, for kernels without netem.
 *
 * late_link DELAY_US: reads process numbers from stdin, one a line. In the network namespace of each
 * it makes a TAP device `eth0` and answers "ready". Frames go to the device that has their target
 * address, DELAY_US after they came. It ends with its stdin, and the devices with it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 64, FRAME = 2048, QUEUE = 1 << 15, ADDRESS = 6 };

struct frame { long long due_ns; int source, size; unsigned char data[FRAME]; };

static struct pollfd files[HOSTS + 1]; /* stdin, then one for each host */
static unsigned char addresses[HOSTS + 1][ADDRESS];
static int hosts;
static struct frame *queue;
static unsigned long first, after_last;

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void add_host(const char *pid, int own_namespace) {
    char path[64];
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    snprintf(path, sizeof path, "/proc/%d/ns/net", atoi(pid));
    int inside = open(path, O_RDONLY | O_CLOEXEC);
    if (inside < 0 || hosts == HOSTS) fail("host");
    if (setns(inside, CLONE_NEWNET)) fail("setns");
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0) fail("/dev/net/tun");
    strcpy(request.ifr_name, "eth0");
    if (ioctl(tap, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (setns(own_namespace, CLONE_NEWNET)) fail("setns back");
    close(inside);
    files[++hosts] = (struct pollfd){.fd = tap, .events = POLLIN};
    puts("ready");
    fflush(stdout);
}

static void take_frames(int host, long long delay_ns) {
    while (after_last - first < QUEUE) {
        struct frame *frame = &queue[after_last % QUEUE];
        frame->size = read(files[host].fd, frame->data, FRAME);
        if (frame->size <= 2 * ADDRESS) return;
        memcpy(addresses[host], frame->data + ADDRESS, ADDRESS); /* the sender's */
        frame->source = host;
        frame->due_ns = now_ns() + delay_ns;
        after_last++;
    }
}

static void deliver(const struct frame *frame) {
    for (int host = 1; host <= hosts; host++) {
        int to_all = frame->data[0] & 1;
        if (host == frame->source || !(to_all || !memcmp(addresses[host], frame->data, ADDRESS))) continue;
        if (write(files[host].fd, frame->data, frame->size) < 0) continue; /* lost, as on any network */
    }
}

int main(int count, char **words) {
    long long delay_ns = count > 1 ? atoll(words[1]) * 1000 : 0;
    int own_namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1);
    queue = malloc(sizeof *queue * QUEUE);
    if (!queue || own_namespace < 0) fail("start");
    files[0] = (struct pollfd){.fd = 0, .events = POLLIN};
    for (;;) {
        long long wait_ns = first == after_last ? 1000000000LL : queue[first % QUEUE].due_ns - now_ns();
        struct timespec wait = {wait_ns > 0 ? wait_ns / 1000000000LL : 0, wait_ns > 0 ? wait_ns % 1000000000LL : 0};
        if (ppoll(files, hosts + 1, &wait, NULL) < 0) fail("ppoll");
        if (files[0].revents) {
            char line[32];
            if (!fgets(line, sizeof line, stdin)) return 0;
            add_host(line, own_namespace);
        }
        for (int host = 1; host <= hosts; host++)
            if (files[host].revents & POLLIN) take_frames(host, delay_ns);
        for (; first != after_last && queue[first % QUEUE].due_ns <= now_ns(); first++)
            deliver(&queue[first % QUEUE]);
    }
}
