/* A wall clock that is off by CLOCK_SHIFT_NS nanoseconds, for programs started with this library in
   LD_PRELOAD. Clocks that count from the machine's start, and all sleeps, stay as they are.
   CLOCK_DRIFT_PPM makes it drift as well, from the moment the machine started.
   (libfaketime changes clock_nanosleep too: with it, time.sleep of Python 3.11 fails.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_wait_by)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static long long shift_ns;
static double drift;

__attribute__((constructor)) static void begin(void) {
  const char *shift = getenv("CLOCK_SHIFT_NS"), *ppm = getenv("CLOCK_DRIFT_PPM");
  shift_ns = shift ? atoll(shift) : 0;
  drift = ppm ? atof(ppm) * 1e-6 : 0;
  real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  real_wait_by = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
}

static int read_clock(clockid_t clock, struct timespec *now) {
  return real_gettime ? real_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
}

static long long off_by(void) {
  struct timespec up;
  if (drift == 0) return shift_ns;
  read_clock(CLOCK_BOOTTIME, &up);
  return shift_ns + (long long)(drift * (up.tv_sec * SECOND + up.tv_nsec));
}

static void add(struct timespec *time, long long ns) {
  long long sum = time->tv_sec * SECOND + time->tv_nsec + ns;
  time->tv_sec = sum / SECOND;
  time->tv_nsec = sum % SECOND;
}

static int is_wall_clock(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = read_clock(clock, now);
  if (code == 0 && is_wall_clock(clock)) add(now, off_by());
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *seconds) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (seconds) *seconds = now.tv_sec;
  return now.tv_sec;
}

/* A program that waits until a time of its own clock has to be woken at that time of the kernel's. */

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *until) {
  struct timespec kernel = *until;
  struct timespec now;
  read_clock(CLOCK_REALTIME, &now);
  /* Far from the wall clock: the condition counts on another clock. */
  if (until->tv_sec > now.tv_sec / 2) add(&kernel, -off_by());
  return real_wait(condition, mutex, &kernel);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
  struct timespec kernel = *until;
  if (is_wall_clock(clock)) add(&kernel, -off_by());
  return real_wait_by(condition, mutex, clock, &kernel);
}
