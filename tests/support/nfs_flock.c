/* flock(2) as Linux's NFS client has it: a byte-range lock of the whole file. It therefore locks no
 * folder, an exclusive lock wants a file that is open for writing, and a shared lock one that is
 * open for reading (man 2 flock, "NFS details"). Preload it: LD_PRELOAD=nfs_flock.so. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

int flock(int fd, int operation)
{
    struct flock whole = {.l_whence = SEEK_SET};
    int kind = operation & ~LOCK_NB;

    whole.l_type = kind == LOCK_UN ? F_UNLCK : kind == LOCK_SH ? F_RDLCK : F_WRLCK;
    return fcntl(fd, operation & LOCK_NB ? F_OFD_SETLK : F_OFD_SETLKW, &whole);
}
