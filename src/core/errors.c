/* Statuses to names and sentences, and the library's version. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

const char *ebb_status_name(ebb_status status)
{
    switch (status) {
#define EBB_STATUS_NAME(name, value, sentence)                                                     \
    case name:                                                                                     \
        return #name;
        EBB_STATUSES(EBB_STATUS_NAME)
#undef EBB_STATUS_NAME
    }
    return "unknown";
}

const char *ebb_status_text(ebb_status status)
{
    switch (status) {
#define EBB_STATUS_TEXT(name, value, sentence)                                                     \
    case name:                                                                                     \
        return sentence;
        EBB_STATUSES(EBB_STATUS_TEXT)
#undef EBB_STATUS_TEXT
    }
    return "not a status of Ebbtide";
}

#define TEXT(number) #number
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *ebb_version(void)
{
    return VERSION(EBB_VERSION_MAJOR, EBB_VERSION_MINOR, EBB_VERSION_PATCH);
}

void ebb__detail(char *detail, size_t length, const char *format, ...)
{
    if (!detail || !length)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, length, format, arguments);
    va_end(arguments);
}
