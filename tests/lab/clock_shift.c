/* Preloaded into a process, shifts its wall clock by CLOCK_SHIFT_S seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long long shift_ns(void)
{
    static long long shift;
    static int known;
    if (!known) {
        const char *text = getenv("CLOCK_SHIFT_S");
        shift = text ? (long long)(atof(text) * 1e9) : 0;
        known = 1;
    }
    return shift;
}

static void add(struct timespec *at)
{
    long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + shift_ns();
    at->tv_sec = ns / 1000000000LL;
    at->tv_nsec = ns % 1000000000LL;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, at);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        add(at);
    return status;
}

int gettimeofday(struct timeval *at, void *zone)
{
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
