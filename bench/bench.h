/*
 * What benchmarks have in common: a clock, the spread of many measurements, and how a figure is
 * printed: as a line to read, or with --json as one object with bench, metric, value and unit.
 */
#ifndef EBB_BENCH_H
#define EBB_BENCH_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct bench {
    const char *name;
    bool json;
} bench;

__attribute__((unused)) static bench bench_begin(const char *name, int argc, char **argv)
{
    bench b = {.name = name, .json = argc > 1 && strcmp(argv[1], "--json") == 0};
    if (argc > 1 && !b.json) {
        fprintf(stderr, "usage: %s [--json]\n", name);
        exit(2);
    }
    return b;
}

__attribute__((unused)) static double bench_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

__attribute__((unused)) static void bench_print(const bench *b, const char *metric, double value,
                                                const char *unit)
{
    if (b->json)
        printf("{\"bench\": \"%s\", \"metric\": \"%s\", \"value\": %.3f, \"unit\": \"%s\"}\n",
               b->name, metric, value, unit);
    else
        printf("  %-44s %12.3f %s\n", metric, value, unit);
    fflush(stdout);
}

__attribute__((unused)) static int bench_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Print the median and the 99th percentile of `count` measurements, and give the median. */
__attribute__((unused)) static double bench_spread(const bench *b, const char *metric,
                                                   double *values, size_t count, const char *unit)
{
    qsort(values, count, sizeof *values, bench_compare);
    char name[128];
    bench_print(b, metric, values[count / 2], unit);
    snprintf(name, sizeof name, "%s_p99", metric);
    bench_print(b, name, values[count * 99 / 100], unit);
    return values[count / 2];
}

#endif
