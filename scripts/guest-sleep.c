/*
 * Preloaded into fio within a guest: a sleep of up to 1 us returns at once.
 *
 * fio measures at its start how long such a sleep takes and spins for that time before each
 * request that it delays (usec_sleep() in its time.c). Under TCG that is 0.4 ms: the spinning
 * would be most of a guest's CPU time.
 */
#include <errno.h>
#include <time.h>

int nanosleep(const struct timespec *time, struct timespec *left)
{
	int error;

	if (time->tv_sec == 0 && time->tv_nsec <= 1000)
		return 0;
	error = clock_nanosleep(CLOCK_MONOTONIC, 0, time, left);
	if (error == 0)
		return 0;
	errno = error;
	return -1;
}
