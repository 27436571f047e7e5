/*
 * The fuzz target without a fuzzer: replays the files of a folder (argv[1]), then inputs made from
 * seeds (argv[2] of them, argv[3] the first). One process, so that a crash is a failed test.
 */
#include <dirent.h>

#include "fuzz.h"
#include "harness.h"
#include "scale.h"

static int replay_file(const char *folder, const char *name)
{
    static uint8_t bytes[1 << 16];
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        FAIL("cannot open %s", path);
        return 0;
    }
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, size);
    return 1;
}

static int replay_folder(const char *folder)
{
    int count = 0;
    DIR *files = opendir(folder);
    REQUIRE(files != NULL);
    for (const struct dirent *entry; (entry = readdir(files)) != NULL;) {
        if (entry->d_name[0] != '.') {
            count += replay_file(folder, entry->d_name);
        }
    }
    closedir(files);
    return count;
}

static void replay_seed(uint64_t seed)
{
    uint8_t bytes[1024];
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < sizeof bytes; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes[i] = (uint8_t)(state >> 24);
    }
    bytes[0] %= 64; /* a card like most */
    LLVMFuzzerTestOneInput(bytes, 64 + seed % (sizeof bytes - 64));
}

int main(int argc, char **argv)
{
    REQUIRE(argc > 1);
    unsigned long seeds = argc > 2 ? strtoul(argv[2], NULL, 10) : SCALED(5000, 1500);
    uint64_t first = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    int files = replay_folder(argv[1]);
    CHECK(files > 0);
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        replay_seed(seed);
    }
    harness_tests++;
    printf("%d files, %lu seeds\n", files, seeds);
    return REPORT();
}
