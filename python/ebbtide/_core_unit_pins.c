/* Which of a unit's weights are resident, and that they stay so while it is entered. */
#include "_core_unit.h"

#include "fast.h"

/* ---- what is resident ----------------------------------------------------------------------------- */

static bool is_here(const unit *u, uint64_t offset, uint64_t bytes, uint64_t signature)
{
    return signature && ebb__vbar_peek(u->vbar->handle, offset, bytes) == signature;
}

uint64_t unit_bytes_here(const unit *u)
{
    uint64_t sum = 0;
    for (size_t i = 0; u->vbar && i < u->piece_count; i++) {
        const piece *p = &u->pieces[i];
        if (is_here(u, p->offset, p->bytes, p->signature))
            sum += p->bytes;
    }
    return sum;
}

bool unit_is_here(const unit *u)
{
    if (!u->vbar)
        return false;
    /* Mostly the runs tell, or the first piece. */
    size_t i = 0;
    while (i < u->run_count &&
           is_here(u, u->runs[i].offset, u->runs[i].bytes, u->runs[i].signature))
        i++;
    if (i == u->run_count)
        return true;
    i = 0;
    while (i < u->piece_count &&
           is_here(u, u->pieces[i].offset, u->pieces[i].bytes, u->pieces[i].signature))
        i++;
    return i == u->piece_count;
}

/* ---- pins ------------------------------------------------------------------------------------------ */

static void unpin_range(unit *u, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    ebb_vbar handle = u->vbar->handle;
    if (ebb__vbar_part(handle, offset, bytes, stream))
        return;
    Py_BEGIN_ALLOW_THREADS
    ebb_vbar_unpin(handle, offset, bytes, stream);
    Py_END_ALLOW_THREADS
}

/* Pin a range that was filled under a signature, and is as it was. */
static bool pin_range(unit *u, uint64_t offset, uint64_t bytes, uint64_t signature,
                      ebb_stream stream, bool slowly)
{
    ebb_vbar handle = u->vbar->handle;
    if (!signature)
        return false;
    uint64_t found = ebb__vbar_hit(handle, offset, bytes, stream);
    if (!found && slowly && ebb__vbar_peek(handle, offset, bytes) == signature) {
        ebb_status status;
        Py_BEGIN_ALLOW_THREADS
        status = ebb_vbar_fault(handle, offset, bytes, stream, &found);
        Py_END_ALLOW_THREADS
        found = status == EBB_OK ? found : 0;
    }
    if (found && found != signature)
        unpin_range(u, offset, bytes, stream);
    return found == signature;
}

bool unit_pin_runs(unit *u, ebb_stream stream, bool slowly)
{
    for (size_t i = 0; i < u->run_count; i++) {
        run *r = &u->runs[i];
        if (pin_range(u, r->offset, r->bytes, r->signature, stream, slowly))
            continue;
        while (i--)
            unpin_range(u, u->runs[i].offset, u->runs[i].bytes, stream);
        return false;
    }
    return true;
}

void unit_unpin_runs(unit *u, ebb_stream stream)
{
    for (size_t i = 0; i < u->run_count; i++)
        unpin_range(u, u->runs[i].offset, u->runs[i].bytes, stream);
}

void unit_unpin_pieces(unit *u, ebb_stream stream)
{
    for (size_t i = 0; i < u->piece_count; i++) {
        piece *p = &u->pieces[i];
        if (!p->pinned)
            continue;
        p->pinned = false;
        unpin_range(u, p->offset, p->bytes, stream);
    }
}

bool unit_pin_pieces(unit *u, const uint64_t *staged, ebb_stream stream)
{
    for (size_t i = 0; i < u->piece_count; i++) {
        piece *p = &u->pieces[i];
        p->staged = staged[i];
        if (p->staged)
            continue;
        if (!pin_range(u, p->offset, p->bytes, p->signature, stream, true)) {
            unit_unpin_pieces(u, stream);
            return false;
        }
        p->pinned = true;
    }
    return true;
}

void unit_sign_runs(unit *u)
{
    size_t at = 0;
    for (size_t i = 0; i < u->run_count; i++) {
        run *r = &u->runs[i];
        uint64_t most = 0;
        for (; at < u->piece_count && u->pieces[at].offset < r->offset + r->bytes &&
               u->pieces[at].offset >= r->offset;
             at++)
            most = u->pieces[at].signature > most ? u->pieces[at].signature : most;
        r->signature = most;
    }
}

bool unit_pin_again(unit *u, ebb_stream stream)
{
    if (u->whole)
        return unit_pin_runs(u, stream, true);
    for (size_t i = 0; i < u->piece_count; i++) {
        const piece *p = &u->pieces[i];
        if (!p->pinned || pin_range(u, p->offset, p->bytes, p->signature, stream, true))
            continue;
        while (i--)
            if (u->pieces[i].pinned)
                unpin_range(u, u->pieces[i].offset, u->pieces[i].bytes, stream);
        return false;
    }
    return true;
}

void unit_unpin_once(unit *u, ebb_stream stream)
{
    if (u->whole)
        unit_unpin_runs(u, stream);
    for (size_t i = 0; !u->whole && i < u->piece_count; i++)
        if (u->pieces[i].pinned)
            unpin_range(u, u->pieces[i].offset, u->pieces[i].bytes, stream);
}

bool unit_covers(const unit *u, uint64_t at)
{
    if (!u->depth || !u->vbar)
        return false;
    for (size_t i = 0; u->whole && i < u->run_count; i++)
        if (at - u->vbar->address - u->runs[i].offset < u->runs[i].bytes)
            return true;
    for (size_t i = 0; !u->whole && i < u->piece_count; i++) {
        const piece *p = &u->pieces[i];
        if (at - (p->pinned ? u->vbar->address + p->offset : p->staged) < p->bytes)
            return true;
    }
    return false;
}
