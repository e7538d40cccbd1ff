/* Checks of the machine's parts that may break while a job runs. `nebula run` makes them before a node joins. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/doctor.h"
#include "cli/human.h"
#include "os/os.h"

#define SYSFS_LIMIT 65536
#define SYSFS_PATH_MAX 512
#define PCI_STORAGE 0x01
#define PCI_NETWORK 0x02
#define PCI_DISPLAY 0x03
#define PCI_ACCELERATOR 0x12
#define CONFIG_BYTES 16 /* a virtual function has no vendor there, but other values */

static bool check_disk(const char *path, struct doctor_finding *finding)
{
        const char *directory = getenv("TMPDIR");
        char text[HUMAN_MAX];
        double seconds;
        int result;

        (void)path;
        if (!directory || *directory != '/')
                directory = "/tmp";
        result = doctor_try_write(directory, 0, &seconds);
        if (result) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.120s: cannot write: %s", directory, os_error_text(result));
                ADVICE(finding, "launchers keep their files there: check that it is mounted, writable and not full, or set TMPDIR");
                return true;
        }
        FOUND(finding, "%.120s: writable, 1 MiB written and synced in %s", directory, human_duration(seconds, text));
        return true;
}

/* Reads a number of a small file, in any base that C knows. Returns `otherwise` if that fails. */
static uint64_t number_in(const char *path, uint64_t otherwise)
{
        char *text = NULL;
        size_t size;
        uint64_t number;

        if (os_read_file(path, SYSFS_LIMIT, &text, &size))
                return otherwise;
        number = strtoull(text, NULL, 0);
        free(text);
        return number;
}

/* Whether a device of a kind that training uses has left the bus: all that it answers is ones. */
static bool is_gone(const char *sysfs, const char *name)
{
        char path[SYSFS_PATH_MAX], *config = NULL;
        uint64_t kind;
        size_t size;
        bool gone;

        snprintf(path, sizeof path, "%s/bus/pci/devices/%.200s/class", sysfs, name);
        kind = number_in(path, 0) >> 16;
        if (kind != PCI_STORAGE && kind != PCI_NETWORK && kind != PCI_DISPLAY && kind != PCI_ACCELERATOR)
                return false;
        snprintf(path, sizeof path, "%s/bus/pci/devices/%.200s/config", sysfs, name);
        if (os_read_file(path, SYSFS_LIMIT, &config, &size))
                return false;
        gone = size >= CONFIG_BYTES;
        for (size_t i = 0; gone && i < CONFIG_BYTES; i++)
                gone = (unsigned char)config[i] == 0xff;
        free(config);
        return gone;
}

static uint64_t memory_errors(const char *sysfs)
{
        char path[SYSFS_PATH_MAX], name[256];
        struct os_dir *dir;
        uint64_t count = 0;

        snprintf(path, sizeof path, "%s/devices/system/edac/mc", sysfs);
        if (os->opendir(path, &dir) < 0)
                return 0;
        while (os->readdir(dir, name, sizeof name) > 0) {
                snprintf(path, sizeof path, "%s/devices/system/edac/mc/%.200s/ue_count", sysfs, name);
                count += number_in(path, 0);
        }
        os->closedir(dir);
        return count;
}

void doctor_devices(const char *sysfs, struct doctor_finding *finding)
{
        char path[SYSFS_PATH_MAX], name[256], gone[256] = "";
        uint64_t errors = memory_errors(sysfs);
        struct os_dir *dir;
        size_t count = 0;

        snprintf(path, sizeof path, "%s/bus/pci/devices", sysfs);
        if (os->opendir(path, &dir) >= 0) {
                while (os->readdir(dir, name, sizeof name) > 0) {
                        count++;
                        if (is_gone(sysfs, name))
                                snprintf(gone + strlen(gone), sizeof gone - strlen(gone), " %.60s", name);
                }
                os->closedir(dir);
        }
        if (*gone) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "do not answer on the PCI bus:%s", gone);
                ADVICE(finding, "see dmesg, and start the machine again: programs that use these devices fail or hang");
        } else if (errors) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%" PRIu64 " memory errors that could not be corrected since the machine started", errors);
                ADVICE(finding, "see dmesg, and test the machine's memory before the next long run");
        } else {
                FOUND(finding, "%zu on the PCI bus, and all answer; no memory errors", count);
        }
}

static bool check_devices(const char *path, struct doctor_finding *finding)
{
        (void)path;
        doctor_devices("/sys", finding);
        return true;
}

const struct doctor_check doctor_health_checks[] = {
        { "free memory", doctor_memory },
        { "disk", check_disk },
        { "devices", check_devices },
};
const size_t doctor_health_count = CLI_COUNT(doctor_health_checks);
