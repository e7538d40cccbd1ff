/* nebula_mpi.f90 calls these functions, which turn Fortran's communicator into C's. The user compiles this file with mpicc. */
#include <nebula_mpi.h>

int nebula_mpi_fortran_open(MPI_Fint communicator, const char *path, nebula_session **ret_session, struct nebula_error *ret_error);
int nebula_mpi_fortran_latest(MPI_Fint communicator, nebula_session *session, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
int nebula_mpi_fortran_save(MPI_Fint communicator, nebula_checkpoint *checkpoint, const char *name, const struct nebula_block *block,
                            const void *data, struct nebula_error *ret_error);
int nebula_mpi_fortran_load(MPI_Fint communicator, nebula_checkpoint *checkpoint, const char *name, const struct nebula_block *block,
                            void *data, struct nebula_error *ret_error);

int nebula_mpi_fortran_open(MPI_Fint communicator, const char *path, nebula_session **ret_session, struct nebula_error *ret_error)
{
        return (int)nebula_mpi_open(MPI_Comm_f2c(communicator), path, ret_session, ret_error);
}

int nebula_mpi_fortran_latest(MPI_Fint communicator, nebula_session *session, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        return (int)nebula_mpi_latest(MPI_Comm_f2c(communicator), session, ret_checkpoint, ret_error);
}

int nebula_mpi_fortran_save(MPI_Fint communicator, nebula_checkpoint *checkpoint, const char *name, const struct nebula_block *block,
                            const void *data, struct nebula_error *ret_error)
{
        return (int)nebula_mpi_save_block(MPI_Comm_f2c(communicator), checkpoint, name, block, data, ret_error);
}

int nebula_mpi_fortran_load(MPI_Fint communicator, nebula_checkpoint *checkpoint, const char *name, const struct nebula_block *block,
                            void *data, struct nebula_error *ret_error)
{
        return (int)nebula_mpi_load_block(MPI_Comm_f2c(communicator), checkpoint, name, block, data, ret_error);
}
